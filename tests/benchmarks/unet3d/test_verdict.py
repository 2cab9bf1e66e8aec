from dataclasses import replace

from benchmarks.unet3d.measured import Failure
from benchmarks.unet3d.verdict import judge, judge_copies
from tests.benchmarks.unet3d.runs import MIB, good_runs, make_configuration, make_study, swapped_only

SMALL, PLAIN, SWAPPED, UNSWAPPED = range(4)


def verdicts(index=None, failures=(), **changes):
    runs = good_runs()
    if index is not None:
        runs[index] = replace(runs[index], **changes)
    return judge(make_study(*runs, failures=failures))


def refuted(found):
    return [verdict.text for verdict in found if verdict.holds is False]


def test_a_good_comparison_holds_budget_and_bits():
    found = verdicts()
    assert [verdict.holds for verdict in found] == [True, True, None, None, None]
    assert "128³ swapped: peak 990.00 MiB, within the budget of 1000.00 MiB" in found[0].text
    assert "equal to the last bit" in found[1].text
    assert "4.50 s a step, 1.50 × the 3.00 s of plain torch and 0.90 × the 5.00 s of the same" in found[3].text
    assert "in turn" not in found[3].text


def test_the_verdict_has_swapped_and_recomputed_bytes_and_hidden_share():
    assert verdicts()[4].text == (
        "128³ swapped: each step swaps 300.00 MiB out and 300.00 MiB in, 90 % of the copying beside compute, waits "
        "100 ms for it, and recomputes 100.00 MiB"
    )
    swapping = replace(good_runs()[SWAPPED].swapping, out_bytes=0, in_bytes=0)
    text = verdicts(SWAPPED, swapping=swapping)[4].text
    assert text == "128³ swapped: each step swaps nothing and recomputes 100.00 MiB"
    text = verdicts(SWAPPED, swapping=replace(swapping, recomputed_bytes=0))[4].text
    assert text == "128³ swapped: the step fits the budget as it is, nothing is swapped"


def test_steps_taken_in_turn_are_reported_as_such():
    in_turn = replace(good_runs()[UNSWAPPED].configuration, takes_turns=True)
    text = verdicts(UNSWAPPED, configuration=in_turn)[3].text
    assert "3.00 s of plain torch and 0.90 × the 5.00 s of the same graphs unswapped, step by step in turn" in text


def test_one_byte_over_the_budget_is_refuted():
    assert not refuted(verdicts(SWAPPED, peak_bytes=1000 * MIB))
    (text,) = refuted(verdicts(SWAPPED, peak_bytes=1000 * MIB + 1))
    assert "OVER the budget of 1000.00 MiB" in text


def test_one_bit_of_one_loss_is_refuted():
    (text,) = refuted(verdicts(UNSWAPPED, loss_bits=("bf000000", "bf000001", "bf000000")))
    assert "swapped and unswapped DIFFER: from step 2 on" in text


def test_other_weights_under_equal_losses_are_refuted():
    (text,) = refuted(verdicts(UNSWAPPED, weights_sha256="v"))
    assert "in the weights after the last step" in text


def test_differences_from_eager_torch_are_reported():
    found = verdicts(PLAIN, loss_bits=("bf000000", "bf000000", "bf000001"))
    assert not refuted(found)
    assert "plain eager torch: not the same bits, from step 3 on" in found[2].text
    assert "plain eager torch: the same bits too" in verdicts()[2].text


def test_a_run_that_failed_is_refuted_in_its_own_words():
    failed = Failure(make_configuration(policy="auto", budget_bytes=1000 * MIB), "was killed")
    assert refuted(judge(make_study(*good_runs()[:2], failures=(failed,)))) == [
        "128³ swapped did not finish: was killed"
    ]


def test_without_an_unswapped_run_equality_is_not_claimed():
    found = judge(make_study(*good_runs()[:3]))
    assert not any("unswapped" in verdict.text for verdict in found)


def test_copies_beside_compute_are_confirmed():
    verdict = judge_copies(swapped_only())
    assert verdict.holds and verdict.text == "128³ swapped-only: copies ran beside compute"


def test_a_run_that_swaps_nothing_is_refuted():
    verdict = judge_copies(swapped_only(out_bytes=0, in_bytes=0))
    assert verdict.holds is False and "128³ swapped-only: NOTHING was swapped" in verdict.text


def test_copies_that_compute_waits_for_are_refuted():
    run = swapped_only()
    verdict = judge_copies(replace(run, figures=replace(run.figures, overlap=0.0)))
    assert verdict.holds is False and "NO copies ran beside compute" in verdict.text


def test_each_run_within_the_budget_has_its_own_verdicts():
    found = judge(make_study(*good_runs(), swapped_only()))
    names = [verdict.text.removeprefix("128³ ").split(":")[0] for verdict in found]
    assert names[5:] == [name.replace("swapped", "swapped-only", 1) for name in names[:5]]
