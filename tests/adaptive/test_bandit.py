"""The bandit: estimates, choices and what trials may cost."""

from eyas.adaptive import bandit
from eyas.adaptive.bandit import Arm, Bandit


def arms() -> Bandit:
    return Bandit({"plain": Arm(1.0, 0.0, 1e-9, 1e-4), "draft": Arm(2.0, 1.0, 1.0, 2e-4)})


def play(choice: Bandit, cycles: int, tokens: float, seconds: float = 2.0) -> list[str]:
    """Plain cycles take a second; those with a draft `seconds`, and yield `tokens`."""
    played = []
    for _ in range(cycles):
        name = choice.playing
        played.append(name)
        choice.observe(name, name, *((1.0, 1.0) if name == "plain" else (tokens, seconds)))
        if choice.may_choose:
            choice.choose()
    return played


def test_failures_double_the_wait_and_success_forgets_them() -> None:
    """Bug: failures are not counted, or not forgotten; a trial goes on with the losses of the one before."""
    choice = arms()
    draft = choice.arms["draft"]
    play(choice, 3000, tokens=1.0)
    assert draft.failures >= 2
    while choice.playing != "draft":
        play(choice, 1, tokens=1.0)
    assert (draft.trial_cycles, draft.trial_tokens) == (0, 0.0)
    play(choice, 400, tokens=4.0)
    assert choice.best == "draft"
    assert draft.failures == 0
    assert (draft.trial_cycles, draft.trial_tokens) == (0, 0.0)
    while choice.playing == "draft" or choice.best == "draft":
        play(choice, 1, tokens=1.0)
    assert draft.failures == 1
    assert 0 < draft.debt <= bandit.MAX_TRIAL_LOSS + 8
