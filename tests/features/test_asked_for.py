"""What `generate(features=...)` takes."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.arguments import request_features
from eyas.core.requests import Request, RequestFeature, check_request
from eyas.errors import InputError, OptionError
from eyas.features import Guidance, Traced


def test_one_or_several() -> None:
    one = Traced()
    assert request_features(one) == (one,)
    assert request_features([one, one]) == (one, one)
    assert request_features(()) == ()


@pytest.mark.parametrize("wrong", ["recall", RequestFeature, 3, [Traced], None])
def test_what_is_not_a_feature_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match="features are objects of subclasses"):
        request_features(wrong)


def test_two_features_with_scores_are_refused() -> None:
    """Bug: the last one wins, and the other one's rule is broken without a word."""
    scoring = Guidance(processors=(lambda ids, scores: scores,))
    check_request(Request((1, 2), 3, features=(scoring, Traced())), 9)
    with pytest.raises(InputError, match="Guidance and Guidance both compute the distribution"):
        check_request(Request((1, 2), 3, features=(scoring, scoring)), 9)
