import hashlib

from hypothesis import given
from hypothesis import strategies as st

from ratchet.data.order import batch_positions, sample_seed, steps_per_epoch

IDS = [f"train-{number:07d}" for number in range(7)]


def test_an_epoch_has_as_many_steps_as_batches_the_last_one_smaller() -> None:
    assert [steps_per_epoch(count, 3) for count in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    assert [batch_positions(step, IDS, 3, seed=0, shuffle=False) for step in range(1, 6)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_the_shuffled_order_is_that_of_the_keys_digests() -> None:
    def digest(seed: int, epoch: int, prompt_id: str) -> str:
        return hashlib.sha256(f"order\x1f{seed}\x1f{epoch}\x1f{prompt_id}".encode()).hexdigest()

    expected = sorted(range(7), key=lambda position: digest(5, 1, IDS[position]))
    # Steps 4 to 6 are the second epoch.
    assert [p for step in (4, 5, 6) for p in batch_positions(step, IDS, 3, seed=5, shuffle=True)] == expected


@given(count=st.integers(1, 40), batch_size=st.integers(1, 45), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 3))
def test_every_epoch_passes_over_every_prompt_once(count: int, batch_size: int, seed: int, epoch: int) -> None:
    ids = [f"p{number}" for number in range(count)]
    per_epoch = steps_per_epoch(count, batch_size)
    steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
    batches = [batch_positions(step, ids, batch_size, seed=seed, shuffle=True) for step in steps]
    assert sorted(position for batch in batches for position in batch) == list(range(count))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    ids = [f"p{number}" for number in range(30)]

    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(batch_positions(epoch + 1, ids, 30, seed=seed, shuffle=True))

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    assert order(1, 2) == order(1, 2)


def test_a_prompt_keeps_its_place_among_the_others_when_one_is_left_out() -> None:
    whole = [IDS[position] for position in batch_positions(1, IDS, 7, seed=0, shuffle=True)]
    fewer = [prompt_id for prompt_id in IDS if prompt_id != IDS[2]]
    kept = [fewer[position] for position in batch_positions(1, fewer, 7, seed=0, shuffle=True)]
    assert kept == [prompt_id for prompt_id in whole if prompt_id != IDS[2]]


def test_a_sample_seed_is_the_digest_of_its_four_keys() -> None:
    digest = hashlib.sha256(b"sample\x1f7\x1f12\x1ftrain-0000003\x1f1").digest()
    assert sample_seed(7, 12, "train-0000003", 1) == int.from_bytes(digest[:8], "big") // 2


def test_a_sample_seed_depends_on_each_of_its_keys() -> None:
    seeds = {
        sample_seed(seed, step, prompt_id, sample)
        for seed in (0, 1, 11)
        for step in (1, 2, 11)
        for prompt_id in ("a", "b", "1")
        for sample in (0, 1, 11)
    }
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)
