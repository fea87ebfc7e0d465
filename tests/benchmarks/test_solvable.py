"""Which prompts a model can learn from: those whose completions do not all earn the same."""

from benchmarks.solvable import solved_sometimes


def test_prompts_that_are_always_or_never_solved_are_left_out() -> None:
    rewards = {"never": [0.0, 0.0, 0.0], "once": [0.0, 1.0, 0.0], "always": [1.0, 1.0, 1.0], "alone": [1.0]}
    answers = [
        {"prompt_id": prompt, "sample_index": index, "reward": reward}
        for prompt, values in rewards.items()
        for index, reward in enumerate(values)
    ]
    assert solved_sometimes(answers) == {"once": 1 / 3}
    assert solved_sometimes(reversed(answers)) == {"once": 1 / 3}
