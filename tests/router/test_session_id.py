import pytest

from pageray.cluster.errors import InvalidParameterError
from pageray.router.session_id import HEADER, MAX_CHARS, session_id


def test_it_is_the_headers_value() -> None:
    assert session_id({HEADER: "abc"}) == "abc"
    assert session_id({}) == ""


def test_a_long_one_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="has 257 characters"):
        session_id({HEADER: "x" * (MAX_CHARS + 1)})
