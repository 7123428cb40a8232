"""Options that would be accepted and ignored, or that two things would share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import drafters
from eyas.cli import _options
from eyas.drafters.eagle3 import choose_draft_vocabulary
from eyas.option_texts import list_options


@pytest.mark.parametrize("command", ["train", "features"])
@pytest.mark.parametrize("value", ["on", "fixed", "compile"])
def test_kernels_where_features_are_read(command: str, value: str, run: Callable[..., Any], tmp_path: Path) -> None:
    """Bug: `train --kernels compile` and `features --kernels on` read the features by the model's own forward, and say
    nothing."""
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}\n')
    arguments = [command, "--data", str(data), "--output", str(tmp_path / "out"), "--kernels", value]
    result = run(*arguments, "--method", "eagle3")
    assert result.exit_code == 2
    assert f"--kernels {value}: features are read by the model's own forward" in result.stderr


def test_no_option_of_a_method_has_a_commands_name() -> None:
    """Bug: DSpark's `--stop 0.4`, a threshold, and the stop string `--stop "."` of generate and chat: one of them wins."""
    groups = [kind for kind in vars(_options).values() if isinstance(kind, type) and is_dataclass(kind)]
    taken = {field.name for group in groups for field in fields(group)} - {"tree"}  # --tree auto, and --tree.nodes
    assert {"stop", "kernels", "temperature"} <= taken
    for name in drafters.names():
        assert not taken & {option.name for option in list_options(drafters.find(name).Options)}, name


def test_a_draft_vocabulary_larger_than_the_data(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: an error after the data is read, where a note and the smaller size would do."""
    counts_V = torch.tensor([0, 3, 1, 0, 2])
    with caplog.at_level(logging.INFO, "eyas"):
        assert choose_draft_vocabulary(counts_V, 2).tolist() == [1, 4]
        assert not caplog.messages
        assert choose_draft_vocabulary(counts_V, 4).tolist() == [1, 2, 4]
    assert caplog.messages == ["head.draft_vocab 4: the training data has 3 different tokens that count, so it is 3"]
