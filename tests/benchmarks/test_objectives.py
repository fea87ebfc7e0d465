"""The table of the objectives, from numbers worked by hand."""

from benchmarks import learning, objectives


def test_first_and_last_steps_are_compared() -> None:
    steps = [{"step": number, "loss": float(number)} for number in range(1, 9)]
    held_out = [{"step": 0, "loss": 2.0, "accuracy": 0.5}, {"step": 8, "loss": 1.0, "accuracy": 0.75}]
    text = objectives.markdown([{"objective": "dpo", "steps": steps, "held_out": held_out}])
    assert text.splitlines()[-1] == "| dpo, 8 | loss 2.500, 6.500 | loss 2.000, 1.000; accuracy 0.500, 0.750 |"


def test_half_of_the_way_is_where_the_mean_of_ten_steps_is() -> None:
    rewards = [0.0] * 10 + [1.0] * 10
    steps = [{"reward": reward, "tokens": 100.0, "seconds": 2.0} for reward in rewards]
    # Of steps 6 to 15 half are 1.
    assert learning.halfway({"steps": steps}) == (1500.0, 30.0)
    steps[14]["elapsed"] = 21.0
    assert learning.halfway({"steps": steps}) == (1500.0, 21.0)
    assert learning.halfway({"steps": steps[:14]}) is None
