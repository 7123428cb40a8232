"""Tests of the tests: every mistake in mutations.py is found, by an assertion, and the code as it is passes."""

import importlib.util
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

import mutations
import processes
from rewriting import DoesNotApplyError, Patch, Rewrite, module_of, rewrite, rewritten

CODE = '''
def other(x):
    return where(x > 0, x, 1)

class A:
    def f(self, p, q):
        """Text."""
        total = sum(a * 2 for a in p)  # a comment
        kept = where(
            total > 0, p / total,
            p,
        )
        return self.g(kept, limit=total + 1)
'''


def lines(change: Rewrite) -> list[str]:
    """The lines that are other ones."""
    before, after = (Counter(rewritten(CODE, c).splitlines()) for c in (rewrite("m:other", "1", "1"), change))
    return sorted((after - before).elements())


def test_rewriting() -> None:
    """Guards the tool: names and formatting do not matter, equal names are equal code, one function is touched."""
    guarded = rewrite("m:A.f", "where(SUM > 0, X / SUM, X)", "X / SUM")
    assert lines(guarded) == ["        kept = p / total"]
    assert lines(rewrite("m:A.f", "self.g(X, ...)", "self.g(-X)")) == ["        return self.g(-kept)"]
    assert lines(rewrite("m:A.f", "X = where(...)", "X = p\nX += 1")) == ["        kept += 1", "        kept = p"]
    known = rewrite("m:A.f", "self.g(X, ...)", "self.g(SUM, X)", "SUM + 1")
    assert lines(known) == ["        return self.g(total, kept)"]


@pytest.mark.parametrize(("change", "reason"), [
    (rewrite("m:A.g", "X", "X"), "there is no g"),
    (rewrite("m:A", "X", "X"), "is no function"),
    (rewrite("m:A.f", "where(X > 1, ...)", "X"), "has 0 pieces like"),
    (rewrite("m:A.f", "where(X > 0, Y / X, X)", "X"), "has 0 pieces like"),
    (rewrite("m:A.f", "X = Y", "pass"), "has 2 pieces like"),
    (rewrite("m:A.f", "self.g(...)", "X", "where(X < 0, ...)"), "has nothing like"),
])  # fmt: skip
def test_what_does_not_apply_says_so(change: Rewrite, reason: str) -> None:
    """Guards the list against a change of the source that leaves a mutation without effect, or with another one."""
    with pytest.raises(DoesNotApplyError, match=reason):
        rewritten(CODE, change)


def test_every_change_applies() -> None:
    """Guards the list against changes of the source, before any mutation is tried."""
    assert len({m.name for m in mutations.MUTATIONS}) == len(mutations.MUTATIONS)
    for change in (change for m in mutations.MUTATIONS for change in m.changes):
        spec = importlib.util.find_spec(module_of(change))
        assert spec is not None, module_of(change)
        assert spec.origin is not None
        if isinstance(change, Patch):
            continue
        source = Path(spec.origin).read_text(encoding="utf-8")
        unchanged = rewrite(change.where, change.pattern, change.pattern, *change.known)
        assert rewritten(source, change) != rewritten(source, unchanged)


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="every mutation is tried in a forked process")
def test_every_mutation_is_found() -> None:
    """Guards that the other tests would notice: each mutation fails its check by an assertion."""
    # what is mutated is Python
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "EYAS_KERNELS": "off"}
    done = processes.run([sys.executable, mutations.__file__], env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    results = {line["trial"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(results) == [name for name, _, _ in mutations.trials()]
    for name, result in results.items():
        if name.startswith(mutations.ORIGINAL):
            assert result["outcome"] == "passed", f"the code as it is fails {name}: {result}"
    wrong = []
    for m in mutations.MUTATIONS:
        if results[m.name]["outcome"] != "assertion" or m.words not in results[m.name]["words"]:
            wrong.append(f"{m.name}: {results[m.name]}")
    assert not wrong, "not found, or for another reason:\n" + "\n".join(wrong)
