"""A bucket of sizes borrows the plan of a larger one until that has cost as much as making a plan for it."""

from lmswap.session.graph_sizes import BorrowedPlans


def test_a_bucket_borrows_until_it_has_lost_the_seconds_of_planning():
    borrowed = BorrowedPlans()
    borrowed.planning_seconds = 1.0
    borrowed.note_run({"length": 97}, 0.6)
    borrowed.note_run({"length": 128}, 0.6)
    assert not borrowed.have_cost_a_plan({"length": 100})
    borrowed.note_run({"length": 112}, 0.6)
    assert borrowed.have_cost_a_plan({"length": 100})
    assert not borrowed.have_cost_a_plan({"length": 128})
