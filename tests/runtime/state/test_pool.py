"""Numbers with owners: handed out once, free after the last owner."""

from hypothesis import given
from hypothesis import strategies as st

from lowbit.runtime.state.pool import Pool


def test_the_lowest_numbers_come_first_and_the_reserved_never() -> None:
    pool = Pool(6, first=2)
    assert pool.free == 4
    assert pool.take(3) == [2, 3, 4]
    assert pool.take(0) == []
    assert pool.take(1) == [5]
    assert pool.free == 0


def test_a_number_is_free_after_its_last_owner() -> None:
    pool = Pool(4)
    one, two = pool.take(2)
    pool.share([one, one, two])
    pool.drop([one, two])
    assert pool.free == 1
    pool.drop([two, one])
    assert pool.free == 2
    assert two in pool.take(2)
    pool.drop([one])
    assert pool.free == 1


@given(st.lists(st.sampled_from(["take", "share", "drop"]), max_size=60), st.data())
def test_owners_are_counted(actions: list[str], data: st.DataObject) -> None:
    pool, owners = Pool(8), dict[int, int]()
    for action in actions:
        held = [number for number, count in owners.items() if count]
        if action == "take" and pool.free:
            for number in pool.take(data.draw(st.integers(1, pool.free))):
                assert not owners.get(number)
                owners[number] = 1
        elif held:
            number = data.draw(st.sampled_from(held))
            (pool.share if action == "share" else pool.drop)([number])
            owners[number] += 1 if action == "share" else -1
        assert pool.free == 7 - sum(count > 0 for count in owners.values())
