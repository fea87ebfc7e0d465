"""A custom reward: the right answer counts, and half a point goes to showing the work.

Use it with `custom_reward_function.path=examples/custom_reward.py custom_reward_function.name=ShownWork`.
"""

from ratchet import DataProto


class ShownWork:
    def __init__(self, bonus: float = 0.5) -> None:
        self.bonus = bonus

    def __call__(self, data: DataProto) -> list[float]:
        rewards = []
        for item in data:
            work, _, answer = item.completion.rpartition("####")
            is_right = answer.strip() == item.ground_truth
            has_work = any(sign in work for sign in "+-*/=")
            rewards.append(float(is_right) + self.bonus * (is_right and has_work))
        return rewards
