"""Which bad steps of a run are looked into, and what is told of them."""

import math
from functools import partial

import torch

from narrowcast.errors import DivergedError
from narrowcast.health.diagnose.investigator import AGAIN, FREE, SHARE, Investigator


def told(net, batch, step, bad, *, verdicts=True, policy="bf16"):
    """Take steps, those in `bad` with an infinity in the stream; return the accounts of all."""
    run, loss_of = net(policy, max_skipped_steps=10**6)
    investigator = Investigator(run, loss_of, diagnose=verdicts)
    accounts = []
    for number, is_bad in enumerate(bad, start=1):
        factor = torch.tensor(math.inf if is_bad else 1.0)
        run.model.between = partial(torch.mul, factor)
        given = [batch(number)]
        replay_inputs = investigator.before(given)
        outcome = step(run, loss_of, given)
        loss = math.nan if is_bad else 1.0
        accounts.append(
            investigator.account(
                number, outcome, loss=loss, replay_inputs=replay_inputs, moved=lambda: False
            )
        )
    return accounts, investigator


def test_a_verdict_is_the_reason_of_the_step_and_a_finding(net, batch, step):
    accounts, _ = told(net, batch, step, [False, True])
    assert (accounts[0].why, accounts[0].findings) == ("", [])
    assert accounts[1].why == "not finite: blocks.1 input, micro-batch 1 of 1"
    (finding,) = accounts[1].findings
    assert (finding.module, finding.role, finding.what) == ("blocks.1", "input", "overflow")
    assert (finding.step, finding.since) == (2, 2)
    assert finding.why.startswith("blocks.1 input became infinite (amax inf, micro")
    assert finding.action == "the step is skipped"


def test_a_change_of_the_loss_scale_is_told_with_the_verdict(net, batch, step):
    accounts, _ = told(net, batch, step, [True], policy="fp16")
    assert accounts[0].why.endswith("micro-batch 1 of 1; loss scale 65536 → 32768")
    assert accounts[0].findings[0].action == "the step is skipped; scale 65536 → 32768"


def test_of_a_long_row_the_first_and_then_every_fiftieth_is_replayed(net, batch, step):
    accounts, _ = told(net, batch, step, [True] * (2 * AGAIN + 1))
    replayed = [n for n, account in enumerate(accounts) if account.findings]
    assert replayed == [0, AGAIN, 2 * AGAIN]
    assert "nearest the loss" in accounts[1].why


def test_replays_are_a_small_share_of_the_steps_of_a_run(net, batch, step):
    accounts, investigator = told(net, batch, step, [n % 2 == 0 for n in range(60)])
    assert (
        sum(bool(account.findings) for account in accounts) == investigator.state_dict()["replays"]
    )
    assert investigator.state_dict()["replays"] <= FREE + SHARE * 60 < 6


def test_without_verdicts_nothing_is_kept_and_nothing_replayed(net, batch, step):
    accounts, investigator = told(net, batch, step, [True], verdicts=False)
    assert investigator.before([batch()]) is None
    assert "nearest the loss" in accounts[0].why
    assert accounts[0].findings == []


def test_what_a_replay_does_not_show_is_said_with_the_names_there_are(net, batch, step):
    run, loss_of = net("bf16")
    investigator = Investigator(run, loss_of, diagnose=True)
    replay_inputs = investigator.before([batch()])
    run.model.between = partial(torch.mul, torch.tensor(math.inf))
    outcome = step(run, loss_of, [batch()])
    run.model.between = partial(torch.mul, torch.tensor(1.0))  # gone, when it is looked for
    account = investigator.account(
        1, outcome, loss=math.nan, replay_inputs=replay_inputs, moved=lambda: True
    )
    assert "nearest the loss" in account.why
    assert account.why.endswith(
        "; a replay, with the weights of a later step, did not reproduce it"
    )


def test_a_replay_that_finds_no_memory_does_not_end_the_run(net, batch, step):
    run, loss_of = net("fp16")

    def exhausted(each):
        raise torch.OutOfMemoryError("CUDA out of memory")

    investigator = Investigator(run, exhausted, diagnose=True)
    replay_inputs = investigator.before([batch()])
    run.model.between = partial(torch.mul, torch.tensor(math.inf))
    outcome = step(run, loss_of, [batch()])
    account = investigator.account(
        1, outcome, loss=math.nan, replay_inputs=replay_inputs, moved=lambda: False
    )
    assert account.why.endswith("not enough memory for a replay; loss scale 65536 → 32768")


def test_an_investigator_goes_on_counting_after_a_resume(net, batch, step):
    _, investigator = told(net, batch, step, [True] * 3)
    run, loss_of = net("bf16")
    other = Investigator(run, loss_of, diagnose=True)
    other.load_state_dict(investigator.state_dict())
    state = other.state_dict()
    assert (state["replays"], state["row"]) == (1, 3)


def test_a_run_that_gives_up_names_what_was_found_in_the_steps_that_led_to_it(net, batch, step):
    given = DivergedError("50 steps in a row", "Look at head")
    _, investigator = told(net, batch, step, [True] * 3)
    resumed = Investigator(*net("bf16"), diagnose=True)
    resumed.load_state_dict(investigator.state_dict())
    for each in (investigator, resumed):
        assert str(each.named(given)).startswith("50 steps in a row. In step 1 blocks.1 input")
    _, recovered = told(net, batch, step, [True, False])
    assert recovered.named(given) is given


def test_a_row_is_explained_by_its_verdict_until_a_good_step_or_other_formats(net, batch, step):
    accounts, investigator = told(net, batch, step, [False, True, True, False])
    assert [each.explained for each in accounts] == [False, True, True, False]
    _, investigator = told(net, batch, step, [True, True])
    investigator.begin_row()
    assert (investigator.state_dict()["row"], investigator.state_dict()["explained"]) == (0, False)
    assert investigator.state_dict()["named"].startswith("In step 1")  # for an error to come


def test_what_outgrew_its_format_is_told_in_the_whole_row_and_after_a_resume(net, batch, step):
    run, loss_of = net("fp16", max_skipped_steps=10**6)
    run.model.between = partial(torch.mul, torch.tensor(1e8))

    def account(investigator, number):
        given = [batch(number)]
        replay_inputs = investigator.before(given)
        outcome = step(run, loss_of, given)
        return investigator.account(
            number, outcome, loss=math.inf, replay_inputs=replay_inputs, moved=lambda: False
        )

    first, second = (Investigator(run, loss_of, diagnose=True) for _ in range(2))
    told = [account(first, 1), account(first, 2)]
    second.load_state_dict(first.state_dict())
    told.append(account(second, 3))
    (finding,) = told[0].findings
    assert {each.overflowed_at for each in told} == {(finding.module, finding.role)}
    assert not told[1].findings
