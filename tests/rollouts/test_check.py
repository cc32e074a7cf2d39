import io
import json

import pytest
from rich.console import Console

from truestep.rollouts.check import Rewards, Spread, check_files, render
from truestep.rollouts.rejects import reason_kind


def text_of(summary, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(summary))
    return console.file.getvalue()


def write(path, *records):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in records))
    return str(path)


def record(length=4, labels=2, **fields):
    return {"input_ids": [1] * length, "prompt_length": length - labels} | fields


@pytest.fixture
def summary(tmp_path):
    rows = [
        record(group_id="x", reward=1, logprobs=[-1, -1], temperature=0.5, id="a"),
        record(group_id="x", reward=1, logprobs=[-1, -1], model_version=3),
        record(group_id="y", reward=4, model_version=[5, 9]),
        record(10, 5, advantage=2),
        record(6, 0),
        record(logprobs=[-1, 0.5], group_id="y"),
        record(logprobs=[0.25, -1]),
        record(logprobs=[0, 0, 7, 0]),
        record(logprobs=[0, 0, 8, 0]),
        record(id="a"),
        "{\n",
    ]
    return check_files(write(tmp_path / "r.jsonl", *rows))


def test_counts(summary):
    assert (summary.records, summary.documents, summary.rejected) == (11, 5, 6)
    assert (summary.tokens, summary.labels, summary.documents_without_labels) == (28, 11, 1)
    assert summary.lengths == Spread(4, 4, pytest.approx(9.2), 10)
    assert summary.label_counts == Spread(0, 2, pytest.approx(4.4), 5)
    assert (summary.groups, summary.group_sizes, summary.groups_of_equal_reward) == (2, ((2, 2),), 1)
    assert summary.documents_without_group == 2
    assert summary.rewards == Rewards(3, 2, 1, 4)
    assert (summary.own_advantages, summary.without_logprobs, summary.without_advantages) == (1, 2, 0)
    assert summary.temperatures == ((0.5, 1), (1.0, 4))
    assert summary.model_versions == (3, 9)


def test_rejections_are_gathered_by_kind(summary, tmp_path):
    first, *others = summary.rejections
    assert first.kind == "logprobs[…] is … on a label: a log-probability is at most 0"
    assert first.count == 4
    place = tmp_path / "r.jsonl"
    assert first.examples[0] == f"{place}:6 logprobs[1] is 0.5 on a label: a log-probability is at most 0"
    assert len(first.examples) == 3
    assert [(other.kind, other.count) for other in others] == [
        ("id is …: repeated", 1),
        ("not valid JSON: Expecting property name enclosed in double quotes (column …)", 1),
    ]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("input_ids[3] is -5: a token id is at least 0", "input_ids[…] is …: a token id is at least 0"),
        ("advantage is 1e+39: not finite in float32", "advantage is …: not finite in float32"),
        ("reward is -inf: expected a finite number", "reward is …: expected a finite number"),
        ("reward is 'it\\'s 4': expected a number", "reward is …: expected a number"),
        ('reward is "it\'s 4": expected a number', "reward is …: expected a number"),
        ("id is 'a': repeated, first at /data 1/f.jsonl:3", "id is …: repeated"),
        ("loss_mask[7] is 2: expected 0 or 1", "loss_mask[…] is …: expected 0 or 1"),
        (
            "input_ids[3] is 120: outside the vocabulary of 100 tokens",
            "input_ids[…] is …: outside the vocabulary of 100 tokens",
        ),
        (
            "logprobs has 3 values: expected 5 (one a token) or 2 (one a label)",
            "logprobs has … values: expected … (one a token) or … (one a label)",
        ),
        ("logprobs is missing: this run's loss", "logprobs is missing: this run's loss"),
    ],
)
def test_kinds(reason, kind):
    assert reason_kind(reason) == kind


def test_the_page_fits_and_says_what_was_found(summary):
    page = text_of(summary)
    assert all(len(line) <= 80 for line in page.splitlines())
    for part in (
        "11: 5 documents, 6 rejected",
        "28, of which 11 labels",
        "missing in 2 of 4 documents with labels",
        "in every document with labels (own or from rewards)",
        "mean 2, from 1 to 4 (3 documents)",
        "0.5 (1 document), 1 (4 documents)",
        "3 to 9",
        "2 groups, 1 of equal reward (advantage 0), 2 documents in none",
        "4x logprobs[…] is … on a label",
    ):
        assert part in page


def test_nothing_at_all(tmp_path):
    summary = check_files([write(tmp_path / "r.jsonl")])
    assert (summary.records, summary.lengths, summary.rewards, summary.rejections) == (0, None, None, ())
    assert "0: 0 documents, 0 rejected" in text_of(summary)


def test_names_from_the_files_are_no_markup_and_no_control_codes(tmp_path):
    path = tmp_path / "[red]\x1b[31m.jsonl"
    page = text_of(check_files(write(path, {"id": "[/bold]"}, record(reward="[blink]"))), width=400)
    assert "[red]?[31m.jsonl:1 input_ids is missing" in page
    assert "reward is '[blink]': expected a number" in page
    assert "\x1b" not in page


def test_limits_are_checked_when_they_are_given(tmp_path):
    path = write(tmp_path / "r.jsonl", record(4), record(9))
    assert check_files(path).rejected == 0
    assert check_files(path, max_tokens=8).rejected == 1
    assert check_files(path, vocabulary_size=1).rejected == 2
    assert check_files(path, default_temperature=0.5).temperatures == ((0.5, 2),)


def test_many_group_sizes_stay_a_page(tmp_path):
    rows = [record(group_id=f"{size}", reward=1) for size in range(1, 40) for _ in range(size)]
    summary = check_files(write(tmp_path / "r.jsonl", *rows))
    assert summary.groups == 39
    page = text_of(summary)
    assert "and 31 more sizes" in page
    assert len(page.splitlines()) < 30


def test_equal_rewards_matter_only_where_they_make_the_advantage(tmp_path):
    own = [record(group_id="own", reward=1, advantage=1.0)] * 2
    alone = [record(group_id="alone", reward=1)]
    mixed = [record(group_id="mixed", reward=1), record(group_id="mixed", reward=2)]
    equal = [record(group_id="equal", reward=2), record(group_id="equal", reward=2)]
    assert check_files(write(tmp_path / "r.jsonl", *own, *alone, *mixed)).groups_of_equal_reward == 0
    assert check_files(write(tmp_path / "r.jsonl", *own, *alone, *mixed, *equal)).groups_of_equal_reward == 1
