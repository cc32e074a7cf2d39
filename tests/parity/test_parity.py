"""`parity` names the cause of a mismatch, first in its list, for each that is planted.

The samplers here are transformers' own models, used as a server would use them wrongly; nothing of truestep's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from adapters import write_adapter, write_merged
from completing import Asked, How, decode
from small_runs import merged
from tiny import expert_model, label_positions, make_model, make_records
from truestep.commands.cli import main
from truestep.config.schema import Config
from truestep.model.loading.load import load_policy
from truestep.rollouts.record import Checks, Needs, parse_record
from truestep.tools.parity.gap import Parity, parity
from truestep.tools.parity.scores import score

Record = dict[str, Any]
SMALL = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96}


def logits_of(model: Any, ids: list[int], cache: Any = None) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=cache is not None).logits[0]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def sampled(
    records: list[Record],
    logits: Callable[[Record], torch.Tensor],
    *,
    temperature: Callable[[Record], float] = lambda record: record.get("temperature", 1.0),
    top_p: float = 1.0,
    off: int = 0,
) -> list[Record]:
    """The records with log-probs as that sampler would report them."""
    made = []
    for record in records:
        positions = label_positions(record)
        z = logits(record).double() / temperature(record)
        log_p = z.log_softmax(-1)
        values = []
        for position in positions:
            row, token = log_p[position - 1], record["input_ids"][position]
            if top_p < 1:
                p = row.exp().sort(descending=True).values
                kept = int((p.cumsum(0) - p < top_p).sum())
                surviving = float(p[:kept].sum())
                values.append(float(row[token]) - torch.tensor(surviving).log().item())
            else:
                values.append(float(row[token]))
        if off:
            values = values[off:] + values[:off]
        made.append({**record, "logprobs": [min(value, 0.0) for value in values]})
    return made


def documents() -> list[Record]:
    records = make_records(4, documents=24, max_length=48, temperatures=False)
    return [record for record in records if len(label_positions(record)) > 1]


def look(
    directory: Path, records: list[Record], tmp_path: Path, older: tuple[Path, ...] = (), **sections: Any
) -> Parity:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    base = {
        "model": {"path": str(directory), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(file), "advantages": "none", "tokens_per_microbatch": 200},
    }
    return parity(Config.model_validate(merged(base, sections)), older=older)


def check_named(result: Parity, cause: str, switch: str = "") -> None:
    assert result.tried[0].cause == cause, [(tried.cause, tried.switch, tried.gap) for tried in result.tried]
    assert switch in result.tried[0].switch
    assert not result.fine
    assert result.verdict.startswith(cause)
    assert result.tried[0].advice in result.verdict


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("parity") / "model", "qwen3", seed=1, **SMALL)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture, a few updates ago."""
    path = make_model(tmp_path_factory.mktemp("parity") / "old", "qwen3", seed=1, **SMALL)
    before = load(path)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    before.save_pretrained(path)
    return path


def test_where_both_agree_nothing_is_blamed(model: Path, old: Path, tmp_path: Path) -> None:
    engine = load(model)
    records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]))
    result = look(model, records, tmp_path, (old,))
    assert result.fine and result.base.gap < 1e-5
    assert "agree" in result.verdict
    assert {tried.cause for tried in result.tried} == {
        *("temperature", "top-p", "top-k", "token ids shifted", "compute dtype", "stale weights", "stale prefix cache"),
        "rope settings",
    }


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """A mixture of experts, and what the engine sampled with it before its routers moved a little."""
    directory = expert_model(tmp_path_factory.mktemp("parity") / "experts")
    policy = load_policy(directory, device="cpu")
    asked = [Asked((number + 5, 9, 11), (number,)) for number in range(12)]
    completions = decode(policy, asked, How(1.0, 1.0, 12, None, frozenset()))
    records = []
    for one, completion in zip(asked, completions, strict=True):
        assert completion.routes is not None
        ids = [*one.input_ids, *completion.token_ids]
        named = {"logprobs": completion.logprobs, "routed_experts": completion.routes.tolist()}
        records.append({"id": str(one.seed[0]), "input_ids": ids, "prompt_length": 3, "advantage": 1.0} | named)
    return directory, records


def test_routing_that_agrees_is_not_blamed(routed: tuple[Path, list[Record]], tmp_path: Path) -> None:
    assert look(*routed, tmp_path).fine


@pytest.mark.parametrize(("by", "switch"), [(1, "experts moved by -1"), (-1, "experts moved by +1")])
def test_routes_shifted_by_one(by: int, switch: str, routed: tuple[Path, list[Record]], tmp_path: Path) -> None:
    directory, records = routed
    moved = []
    for record in records:
        rows = record["routed_experts"]
        moved.append(record | {"routed_experts": [rows[0], *rows] if by > 0 else rows[1:]})
    check_named(look(directory, moved, tmp_path), "routing", switch)


def test_routes_of_other_tokens(routed: tuple[Path, list[Record]], tmp_path: Path) -> None:
    directory, records = routed
    others = [record["routed_experts"] for record in records]
    mixed = [record | {"routed_experts": others[place - 1]} for place, record in enumerate(records)]
    check_named(look(directory, mixed, tmp_path), "routing", "the policy's own experts")


def test_routes_that_are_not_replayed(routed: tuple[Path, list[Record]], tmp_path: Path) -> None:
    """The sampler named experts that the trainer's routers do not choose, and replay is off."""
    directory, records = routed
    policy = load_policy(directory, device="cpu")
    others = [(np.array(record["routed_experts"]) + 1) % 4 for record in records]
    given = [record | {"routed_experts": routes.tolist()} for record, routes in zip(records, others, strict=True)]
    rollouts = [parse_record(record, "", Checks(Needs(True, False, "none"))) for record in given]
    found = score(policy, rollouts, 200).plain
    ends = np.cumsum([rollout.num_labels for rollout in rollouts])[:-1]
    drawn = [record | {"logprobs": part.tolist()} for record, part in zip(given, np.split(found, ends), strict=True)]
    check_named(look(directory, drawn, tmp_path, model={"experts": {"replay": "off"}}), "routing", "replayed")


def naming_experts(engine: Any, routes: np.ndarray, start: int) -> list[Any]:  # [tokens, layers, k]
    """Let the routers of transformers' own model choose these experts, from the row `start` on."""

    def of_layer(layer: int) -> Callable[..., Any]:
        def hook(_: Any, given: Any, output: Any) -> Any:
            logits, _, index = output
            chosen = torch.tensor(routes[start : start + len(index), layer])
            chosen = torch.cat([chosen, index[len(chosen) :]])  # the last token was fed to nobody
            p = logits.softmax(-1).gather(1, chosen)
            return logits, p / p.sum(-1, keepdim=True) if engine.config.norm_topk_prob else p, chosen

        return hook

    routers = [module for module in engine.modules() if type(module).__name__.endswith("Router")]
    return [router.register_forward_hook(of_layer(layer)) for layer, router in enumerate(routers)]


def test_stale_prefix_cache_of_a_mixture(routed: tuple[Path, list[Record]], tmp_path: Path) -> None:
    """Its records name experts that no router of either weights chooses."""
    directory, records = routed
    engine, before = load(directory), load(directory)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    before.save_pretrained(tmp_path / "old")
    named = [
        record | {"prompt_length": 9, "routed_experts": ((np.array(record["routed_experts"]) + 1) % 4).tolist()}
        for record in records
    ]
    named = [{name: value for name, value in record.items() if name != "logprobs"} for record in named]

    def logits(record: Record) -> torch.Tensor:
        ids, routes, cut = record["input_ids"], np.array(record["routed_experts"]), record["prompt_length"] - 1
        hooks = naming_experts(before, routes, 0)
        with torch.no_grad():
            cache = before(input_ids=torch.tensor([ids[:cut]]), use_cache=True).past_key_values
        hooks += naming_experts(engine, routes, cut)
        tail = logits_of(engine, ids[cut:], cache)
        for hook in hooks:
            hook.remove()
        return torch.cat([torch.zeros(cut, tail.shape[1]), tail])

    found = look(directory, sampled(named, logits), tmp_path, (tmp_path / "old",))
    check_named(found, "stale prefix cache", "prompts cached by old")
    assert found.tried[0].gap < 1e-5


def test_head_rounding(model: Path, tmp_path: Path) -> None:
    """The head's logits are rounded to bfloat16 there, and not here."""
    engine = load(model, torch.bfloat16)
    records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]))
    given = {"dtype": "bfloat16", "head": {"fp32_lm_head": True}}
    check_named(look(model, records, tmp_path, model=given), "head rounding", "fp32_lm_head: false")


def test_temperature(model: Path, tmp_path: Path) -> None:
    """Sampled at 0.7, with log-probs of before the temperature, as vLLM reports them unless told otherwise."""
    engine = load(model)
    raw = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]), temperature=lambda _: 1.0)
    records = [{**record, "temperature": 0.7} for record in raw]
    check_named(look(model, records, tmp_path), "temperature", "temperature 1")


def test_top_p(model: Path, tmp_path: Path) -> None:
    engine = load(model)
    records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]), top_p=0.9)
    check_named(look(model, records, tmp_path), "top-p", "top-p 0.9")


def test_very_unlikely_labels_are_tried_after_truncation_too(model: Path, tmp_path: Path) -> None:
    """A float32 probability of e^-110 is 0. The label was not drawn by the policy, and its log-prob is known."""
    engine = load(model)
    with torch.no_grad():
        engine.get_output_embeddings().weight.mul_(40)
    engine.save_pretrained(tmp_path / "sharp")
    policy = load_policy(tmp_path / "sharp", device="cpu")
    records = [record | {"advantage": 1.0} for record in documents()]
    scored = score(
        policy, [parse_record(record, "", Checks(Needs(True, False, "none"))) for record in records], 200, wide=True
    )
    assert scored.plain.min() < -110
    z = torch.cat([logits_of(engine, record["input_ids"])[np.array(label_positions(record)) - 1] for record in records])
    p = z.double().softmax(-1).sort(descending=True).values.numpy()
    for count, values in scored.by_top_k.items():
        np.testing.assert_allclose(values, scored.plain - np.log(p[:, :count].sum(-1)), rtol=1e-4, atol=1e-3)
    for top_p, values in scored.by_top_p.items():
        assert np.isfinite(values).all() and (values >= scored.plain).all(), top_p


def test_stale_weights(model: Path, old: Path, tmp_path: Path) -> None:
    engine = load(old)
    records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]))
    check_named(look(model, records, tmp_path, (old,)), "stale weights", "weights of old")


def test_stale_weights_are_recognised_by_the_runs_own_checkpoints(model: Path, old: Path, tmp_path: Path) -> None:
    import shutil

    for step, path in ((1, old), (2, model)):
        made = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        shutil.copytree(path, made)
        (made / "truestep").mkdir()
        for name in ("state.json", "checksums.json"):
            (made / "truestep" / name).write_text("{}", encoding="utf-8")
    engine = load(old)
    records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]))
    result = look(model, records, tmp_path, checkpoint={"directory": str(tmp_path / "run")})
    check_named(result, "stale weights", "weights of step-00000001")


def test_stale_prefix_cache(model: Path, old: Path, tmp_path: Path) -> None:
    before, engine = load(old), load(model)

    def logits(record: Record) -> torch.Tensor:
        ids = record["input_ids"]
        cut = max(0, label_positions(record)[0] - 1)
        if not cut:
            return logits_of(engine, ids)
        with torch.no_grad():
            cache = before(input_ids=torch.tensor([ids[:cut]]), use_cache=True).past_key_values
        tail = logits_of(engine, ids[cut:], cache)
        return torch.cat([torch.zeros(cut, tail.shape[1]), tail])

    records = sampled([record for record in documents() if label_positions(record)[0] > 2], logits)
    check_named(look(model, records, tmp_path, (old,)), "stale prefix cache", "prompts cached by old")


def test_token_ids_shifted(model: Path, tmp_path: Path) -> None:
    engine = load(model)
    records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]), off=1)
    check_named(look(model, records, tmp_path), "token ids shifted")


def test_token_ids_retokenised(tmp_path: Path) -> None:
    """The sampler drew a|bc; whoever scored it tokenised the text anew, into ab|c."""
    words = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "d": 5}
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab=words, merges=[("a", "b"), ("b", "c")])))
    model = make_model(tmp_path / "model", "llama", vocab_size=6, pad_token_id=None, bos_token_id=None, eos_token_id=5)
    fast.save_pretrained(model)
    drawn = [[5, 0, 4, 5, 0, 4], [0, 4, 5, 5, 0, 4, 0, 4], [5, 5, 0, 4]]
    plain = [{"id": str(n), "input_ids": [5, 5, *ids], "prompt_length": 2} for n, ids in enumerate(drawn)]
    anew = [{**r, "input_ids": [5, 5, *fast.encode(fast.decode(r["input_ids"][2:]))]} for r in plain]
    assert [len(r["input_ids"]) for r in anew] == [len(r["input_ids"]) for r in plain]
    engine = load(model)
    scored = sampled(anew, lambda record: logits_of(engine, record["input_ids"]))
    records = [
        {**record, "logprobs": other["logprobs"], "advantage": 1.0} for record, other in zip(plain, scored, strict=True)
    ]
    check_named(look(model, records, tmp_path), "token ids re-tokenised")


def test_compute_dtype(model: Path, tmp_path: Path) -> None:
    engine = load(model, torch.bfloat16)
    records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]))
    check_named(look(model, records, tmp_path), "compute dtype", "bfloat16")


def test_rope_settings(model: Path, tmp_path: Path) -> None:
    """Served with the default base in place of the model's own."""
    engine = load(model)
    config = engine.config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    served = type(engine)(config).eval()
    served.load_state_dict(engine.state_dict())
    records = sampled(documents(), lambda record: logits_of(served, record["input_ids"]))
    check_named(look(model, records, tmp_path), "rope settings", "rope_theta: 10000 for")


def test_the_command(model: Path, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(old)
    records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]))
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    config = f"model: {{path: {model}, dtype: float32}}\ndata: {{path: r.jsonl, advantages: none}}\n"
    (tmp_path / "c.yaml").write_text(config, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["parity", "c.yaml", "--output", "out", "--older", str(old)])
    assert done.exit_code == 0, done.output
    assert "stale weights (weights of old) explains 100% of the gap" in done.stdout
    assert "worst: document" in done.stdout
    said = json.loads((tmp_path / "out" / "parity.json").read_text(encoding="utf-8"))
    assert said["causes"][0]["cause"] == "stale weights"
    assert (tmp_path / "out" / "parity.svg").read_text(encoding="utf-8").startswith("<svg")


def test_records_without_logprobs_are_refused(model: Path, tmp_path: Path) -> None:
    records = make_records(4, documents=3, with_logprobs=False)
    with pytest.raises(Exception, match="no record of .* has both labels and log-probs"):
        look(model, records, tmp_path)


def test_an_adapter_that_was_never_delivered_and_an_older_one(model: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        write_adapter(tmp_path / f"adapter-{seed}", model, seed=seed)
        write_merged(model, tmp_path / f"adapter-{seed}", tmp_path / f"merged-{seed}")
    given = {"path": str(tmp_path / "adapter-2")}
    older = (tmp_path / "adapter-1",)

    def seen(directory: Path) -> Parity:
        engine = load(directory)
        records = sampled(documents(), lambda record: logits_of(engine, record["input_ids"]))
        return look(model, records, tmp_path, older, adapter=given)

    agrees = seen(tmp_path / "merged-2")
    assert agrees.fine and {"compute dtype", "rope settings"} <= {tried.cause for tried in agrees.tried}
    check_named(seen(model), "stale weights", f"weights of {model.name}")
    check_named(seen(tmp_path / "merged-1"), "stale weights", "weights of adapter-1")
