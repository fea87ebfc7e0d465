from ratchet.tracking.progress import Progress


def test_everything_is_missing_at_first(chain) -> None:
    data = chain.commit("preprocess/train", None, {})
    steps = [*chain.step(1), *chain.step(2)]
    assert list(Progress().missing(chain.run)) == [data, *steps]


def test_what_arrived_is_not_offered_again_in_another_process(chain) -> None:
    progress = Progress()
    for manifest in [chain.commit("preprocess/train", None, {}), *chain.step(1), *chain.step(2)]:
        progress.add(manifest)
    rollout = chain.commit("rollout", 3, {})
    progress.add(rollout)
    reward = chain.commit("reward", 3, {})
    assert list(Progress.from_json(progress.to_json()).missing(chain.run)) == [reward]


def test_a_stage_after_the_last_update_is_still_offered(chain) -> None:
    progress = Progress()
    for manifest in chain.step(1):
        progress.add(manifest)
    evaluate = chain.commit("evaluate", 1, {})
    assert list(progress.missing(chain.run)) == [evaluate]


def test_the_base_that_is_evaluated_late_is_offered_once(chain) -> None:
    progress = Progress()
    for manifest in [*chain.step(1), *chain.step(2)]:
        progress.add(manifest)
    evaluate = chain.commit("evaluate", 0, {})
    assert list(Progress.from_json(progress.to_json()).missing(chain.run)) == [evaluate]
    progress.add(evaluate)
    for manifest in chain.step(3):
        progress.add(manifest)
    assert list(Progress.from_json(progress.to_json()).missing(chain.run)) == []


def test_a_lowered_floor_offers_the_older_steps_again(chain) -> None:
    first, second = chain.step(1), chain.step(2)
    progress = Progress()
    for manifest in [*first, *second]:
        progress.add(manifest)
    progress.lower(1)
    assert list(progress.missing(chain.run)) == first


def test_the_text_stays_short_over_a_long_run(chain) -> None:
    progress = Progress()
    for step in range(1, 30):
        for manifest in chain.step(step):
            progress.add(manifest)
    assert len(progress.to_json()) < 200


def test_any_other_text_is_no_progress() -> None:
    for text in (None, "", "x", "[]", '{"floor": "a", "stages": []}', '{"floor": 1}'):
        assert (Progress.from_json(text).floor, Progress.from_json(text).stages) == (0, set())
