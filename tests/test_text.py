"""Foreign text that is shown: no escapes, no megabytes, no secrets."""

from __future__ import annotations

import pytest

from truestep import text
from truestep.text import hidden_options, keep_secret, printable, redacted, redacted_options, shown


@pytest.fixture(autouse=True)
def no_known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_known", set())


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        ("\x1b[2J\x1b]0;owned\x07done", r"\x1b[2J\x1b]0;owned\x07done"),
        ("two\nlines\r\ttab", r"two\nlines\r\ttab"),
        ("right\u202eleft\u2028", r"right\u202eleft\u2028"),
        ("\ud800", r"\ud800"),
        ("grün 漢字 🙂", "grün 漢字 🙂"),
        (b"\x1b[31m\xff", r"\x1b[31m" + "\N{REPLACEMENT CHARACTER}"),
        (Unshowable(), "<Unshowable that cannot be shown>"),
        (KeyError("a\x1bb"), r"'a\x1bb'"),
    ],
)
def test_foreign_text_is_one_line_without_escapes(foreign: object, expected: str) -> None:
    assert printable(foreign) == expected
    assert shown(foreign).replace("\n", r"\n") == expected


@pytest.mark.parametrize("letter", ["x", "\x1b", "\n", "🙂", "\U000e0001"])
def test_five_megabytes_are_cut(letter: str) -> None:
    for limit in (10, 300):
        for count in (1, limit - 1, limit, limit + 1, 5_000_000):
            found = printable(letter * count, limit)
            assert len(found) <= limit
            assert found.isprintable()
            assert found.endswith("…") is (len(printable(letter, 20)) * count > limit)
    assert len(shown(letter * 5_000_000)) <= 10_000


@pytest.mark.parametrize(
    "whole",
    [
        "redis://user:hunter22@host:6379/0",
        "rediss://:hunter22@host/0?ssl=1",
        "redis://:hunt#er22/hunter22@host:6379/0",
        "http://hunter22@host/v1",
        "see http://host/v1?api_key=hunter22&n=3",
        "https://host/x?token=hunter22",
        "Authorization: Bearer hunter22hunter22",
        "password: hunter22",
        'the answer was {"api_key": "hunter22", "model": "m"}',
        "HF_TOKEN=hunter22",
        "db_password = 'hunter22'",
    ],
)
def test_secrets_are_hidden_by_where_they_stand(whole: str) -> None:
    for function in (redacted, printable, shown):
        found = function(whole)
        assert "hunter22" not in found and "***" in found
        assert ("host" in whole) == ("host" in found), "what is no secret stays"
    # A cut in the middle of a secret shows no half of it.
    for limit in range(10, len(whole)):
        assert "hunter2" not in printable(whole, limit)


@pytest.mark.parametrize(
    "plain",
    [
        "token: 5, position: 3",
        "max_new_tokens: 512",
        "the key 'id' is given twice",
        "api_key_env: OPENAI_KEY",
        "http://host:8000/v1?n=3",
        "mail me@example.org",
        "a.jsonl:12: not JSON",
        "tokens_per_microbatch=40",
        "password: null",
    ],
)
def test_what_is_no_secret_stays(plain: str) -> None:
    assert redacted(plain) == plain


def test_known_secrets_are_hidden_anywhere() -> None:
    keep_secret("sk-12345678")
    keep_secret("short")
    assert printable("the key sk-12345678 is invalid; short") == "the key *** is invalid; short"
    assert redacted_options({"path": "runs/sk-12345678"}) == {"path": "runs/sk-12345678"}, "a path must still be read"


def test_options_are_redacted_at_any_depth() -> None:
    options = {
        "url": "redis://:pw@h/0",
        "urls": ["http://u:p@a", "http://b"],
        "inner": {"api_key": "x", "password": 123, "token": "t", "pad_token": 7, "key": None, "api_key_env": "NAME"},
        "tokens": 4,
    }
    before = repr(options)
    found = redacted_options(options)
    assert repr(options) == before
    assert found == {
        "url": "redis://***@h/0",
        "urls": ["http://***@a", "http://b"],
        "inner": {
            "api_key": "***",
            "password": "***",
            "token": "***",
            "pad_token": 7,
            "key": None,
            "api_key_env": "NAME",
        },
        "tokens": 4,
    }
    assert redacted_options(found) == found
    assert hidden_options(options) == []
    assert hidden_options(found) == ["url", "urls", "inner.api_key", "inner.password", "inner.token"]


@pytest.mark.parametrize(
    "text", ["a:" * 200_000, "://" * 200_000, "x" * 500_000, "a@" * 200_000 + "://", "Bearer " * 90_000]
)
def test_long_odd_text_takes_no_time_to_speak_of(text: str) -> None:
    """A pattern that goes back and forth would take hours here."""
    assert redacted(text)
    assert 0 < len(printable(text)) <= 300
