"""The step on a language model: it is the toy's step, measures are estimates, and nothing of a run is lost."""
# ruff: noqa: E402 (the whole file is skipped before it imports what is not there)

import csv
import dataclasses
import json
import re
import shutil

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from conftest import InThisProcess, generator
from safetensors.torch import load_file

from lab import command_line, workers
from lab.flags import parse_settings
from lab.reference import make_reference
from lab.run import Run, train
from lab.settings import Experiment, Settings, Shape, parse_method
from language_models import run as text_run
from language_models.llama import export_policy
from language_models.loading import load_model
from language_models.policy import HFPolicy
from language_models.run import TextRuns, answer_probs, make_task
from language_models.tasks import TextTask
from minirlvr import Sampling, rollout, sampled_step, score, update_policy, wait_for_spread
from tests.language_models.models import make_tokenizer, save_chat_model
from toy_tasks import TASKS, Padded, Sums, UserError


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """No worker processes, and one thread as before."""
    monkeypatch.setattr(workers, "ProcessPoolExecutor", InThisProcess)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny untrained Llama with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model")
    save_chat_model(path)
    return path


@pytest.fixture(scope="module")
def toy():
    """A toy policy for `sums` of the default size that is right now and then."""
    task = Sums()
    task.pretraining_steps = 60
    return make_reference(task, Shape())


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory, toy):
    """The same, exported."""
    path = tmp_path_factory.mktemp("toy")
    export_policy(toy, Sums(), path)
    return path


@pytest.fixture
def dataset(tmp_path):
    """Six questions, the first of them answered by anything that ends in a digit 0 to 9 often enough to be seen."""
    rows = [{"question": f"What is {n} + 0?", "answer": f"It stays.\n#### {n}"} for n in range(6)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(folder, out, *more):
    """The flags of a run of seconds."""
    short = "--steps 2 --prompts 2 --group-size 4 --evaluate-every 2 --evaluation-samples 8 --memory-width 16 --heads 2"
    return ["--policy", f"hf:{folder}", *short.split(), "--max-new-tokens", "6", "--out", str(out), *more]


def settings(folder, *more) -> Settings:
    return parse_settings(flags(folder, "unused", *more))


def start_run(settings: Settings, method: str) -> Run:
    """As a worker process does."""
    return TextRuns(settings).start(parse_method(method), 0, "cpu")


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# --- one loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "grpo+iac+dlc"])
def test_an_exported_policy_learns_as_the_toy_does(toy, toy_folder, tmp_path, method):
    """Five steps with the same draws, through the toy policy and through transformers: losses and weights to 1e-4."""
    chosen = dataclasses.replace(Settings(), experiment=Experiment(steps=5, evaluate_every=1))
    runs = [
        Run(chosen, parse_method(method), 0, reference, task=Sums())
        for reference in (toy, load_model(str(toy_folder))[0])
    ]
    for run in runs:
        train(run)
    theirs, ours = ([row for row in run.rows if row["split"] == "train"] for run in runs)
    for one, other in zip(theirs[1:], ours[1:], strict=True):
        assert one["reward"] == other["reward"], "the two drew different tokens"
        for name in ("loss", "grad_norm", "entropy", "pass@1", "effective_modes"):
            assert other[name] == pytest.approx(one[name], abs=1e-4), name
    export_policy(runs[0].policy, Sums(), tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    start = load_file(toy_folder / "model.safetensors")
    trained = runs[1].policy.model.state_dict()
    assert max((trained[name] - expected[name]).abs().max() for name in expected) < 1e-4
    assert max((trained[name] - start[name]).abs().max() for name in expected) > 1e-3


def test_an_exported_policy_is_asked_and_measured_as_the_toy(toy_folder, tmp_path):
    """On the command line, too: exact measures, the toy's columns."""
    out = tmp_path / "run"
    argv = ["--policy", f"hf:{toy_folder}", "--steps", "2", "--methods", "grpo", "--out", str(out)]
    assert command_line.main(argv) == 0
    assert "retained_mass" in rows_of(out)[0] and "samples" not in rows_of(out)[0]
    assert 0 < float(rows_of(out)[-1]["pass@1"]) < 1


@pytest.mark.parametrize("more", [(), ("--lora-rank", "2"), ("--gradient-checkpointing",)], ids=["all", "lora", "ckpt"])
def test_micro_batches_change_nothing(folder, more):
    """1, 2 and 4 parts of a batch of 4 prompts: the same gradient."""
    found = []
    for parts in ("1", "2", "4"):
        chosen = settings(folder, "--micro-batches", parts, "--prompts", "4", *more)
        run = start_run(chosen, "grpo")
        prompts = run.task.encode_prompts(run.task.train[:4])
        batch = rollout(run.policy, prompts, 4, 6, run.generator, stops=run.task.stops, pad=run.task.pad)
        update_policy(run, batch, torch.randn(4, 4, generator=generator()), None)
        found.append({name: p.grad.clone() for name, p in run.policy.named_parameters() if p.grad is not None})
    assert max(g.abs().max() for g in found[0].values()) > 1e-3
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_ratio_is_1(folder, dtype):
    """In half precision, too: there the batch is scored again by the pass that learns."""
    run = start_run(settings(folder, "--dtype", dtype), "grpo")
    sampled_step(run)
    prompts = run.task.encode_prompts(run.task.train[:2])
    batch = rollout(run.policy, prompts, 4, 6, run.generator, stops=run.task.stops, pad=run.task.pad)
    again = batch._replace(logprobs=score(run.policy, batch))
    batch = again if dtype == "bfloat16" else batch
    update_policy(run, batch, torch.randn(2, 4, generator=generator()), None)
    assert run.logged["first_ratio"][-1] < (1e-3 if dtype == "bfloat16" else 1e-5)


def test_the_reference_is_copied_only_where_it_is_asked(folder):
    """Without a KL term or P2's rewards there is no second model; with LoRA never."""
    for more, method, kind in (
        ((), "grpo", type(None)),
        (("--beta", "0.1"), "grpo", HFPolicy),
        ((), "temper", HFPolicy),
        (("--lora-rank", "2", "--beta", "0.1"), "grpo", torch.nn.Module),
    ):
        run = start_run(settings(folder, *more), method)
        assert isinstance(run.reference, kind)
        before = [p.clone() for p in run.reference.parameters()] if isinstance(run.reference, HFPolicy) else []
        sampled_step(run)
        for one, other in zip(before, run.reference.parameters() if before else [], strict=True):
            assert torch.equal(one, other)


def test_dapo_joins_prompts_of_different_width(folder, dataset):
    """Groups that wait have the padding of their own batch; joined, they have one width and the same logits."""
    run = start_run(settings(folder, "--dataset", str(dataset)), "dapo")
    one_mixed = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]])
    batches = []
    for width in (5, 8):
        prompt = Padded.of(torch.randint(10, 400, (2, width), generator=generator(width)))
        batches.append(rollout(run.policy, prompt, 4, 6, run.generator, stops=run.task.stops, pad=run.task.pad))
    assert wait_for_spread(run, batches[0], one_mixed)[0] is None
    joined, rewards = wait_for_spread(run, batches[1], one_mixed)
    assert joined.prompts.shape == (2, 8) and joined.real.sum(1).tolist() == [5, 8]
    assert rewards.shape == (2, 4)
    torch.testing.assert_close(score(run.policy, joined), joined.logprobs, atol=1e-5, rtol=1e-5)


# --- the memory network ---------------------------------------------------------------------------------------------


def test_the_memory_speaks_the_models_vocabulary(folder):
    """Fresh, a copy of the model, or another model: as many logits."""
    for start in ("fresh", "reference", f"hf:{folder}"):
        run = start_run(settings(folder, "--memory-start", start), "grpo+dlc")
        logits = run.memory.start(run.task.encode_prompts(run.task.train[:1]), 2)[0]
        assert logits.shape == (1, 2, run.policy.vocab_size)
        sampled_step(run)


def test_a_memory_with_another_vocabulary_is_one_line(folder, toy_folder):
    with pytest.raises(UserError, match="464 tokens, the memory for 14"):
        start_run(settings(folder, "--memory-start", f"hf:{toy_folder}"), "grpo+dlc")


# --- measures -------------------------------------------------------------------------------------------------------


def test_listed_answers_are_summed_as_a_plain_loop_sums_them(folder):
    """Each answer as a text of its own, token by token."""
    run = start_run(settings(folder), "grpo")
    found = answer_probs(run.policy, run.task, "12=", temperature=0.7)
    prompt = run.task.encode_prompt("12=")
    for mode, probability in zip(run.task.modes("12="), found.tolist(), strict=True):
        ids = run.task.answer_ids(mode)
        logprobs = (run.policy(Padded.of(torch.tensor([prompt + ids])))[0] / 0.7).log_softmax(-1)
        by_hand = sum(logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(ids))
        assert probability == pytest.approx(torch.tensor(by_hand).exp().item(), rel=1e-3)


def test_estimates_count_what_the_model_says(folder, monkeypatch):
    """A model made to answer "5+7" after every prompt: right for 12 alone, 1 mode, and the interval says it is sure."""
    run = start_run(settings(folder, "--evaluation-samples", "16"), "grpo")
    answer = [*run.task.encode("5+7"), run.task.stops[0]]

    class Sure(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.anything = torch.nn.Parameter(torch.zeros(1))

        def start(self, prompts, G, length=1):
            return self.at(0).expand(len(prompts.tokens), G, -1), 1

        def step(self, tokens, t):
            return self.at(t).expand(*tokens.shape, -1), t + 1

        def at(self, t):
            return torch.nn.functional.one_hot(torch.tensor(answer[min(t, len(answer) - 1)]), 464) * 100.0

        def completion_logits(self, prompts, completions):
            return torch.stack([self.at(t) for t in range(completions.shape[2])]).expand(*completions.shape, -1)

    run.policy = Sure()
    measured = run.measure()["train"]
    assert measured["pass@1"] == measured["pass@8"] == measured["distinct@8"] == pytest.approx(1 / 10)
    assert measured["effective_modes"] == 1
    assert measured["pass@1_low"] == measured["pass@1_high"] == measured["pass@1"]
    assert measured["listed_pass@1"] == pytest.approx(1 / 10, abs=1e-6)
    assert measured["samples"] == 16


def test_rows_hold_estimates_their_intervals_and_the_number_of_samples(folder, tmp_path):
    """The same files as a toy run; every estimate within its interval and its bounds."""
    out = tmp_path / "run"
    assert command_line.main(flags(folder, out)) == 0
    assert {"config.json", "metrics.csv", "summary.json", "collapse.png"} < {path.name for path in out.iterdir()}
    rows = rows_of(out)
    assert {row["method"] for row in rows} == {"grpo", "grpo+iac+dlc"}
    for row in rows:
        for name in ("pass@1", "pass@8", "distinct@8"):
            low, value, high = (float(row[name + end]) for end in ("_low", "", "_high"))
            assert 0 <= low <= value <= high, name
        assert float(row["samples"]) == 8
        assert 0 <= float(row["listed_pass@1"]) <= 1
    config = json.loads((out / "config.json").read_text())
    assert config["settings"]["update"]["learning_rate"] == 1e-5
    assert set(config["versions"]) >= {"transformers", "tokenizers", "safetensors"}
    assert "pass@1" in json.loads((out / "summary.json").read_text())["grpo"]["heldout"]


def test_measuring_changes_no_run_and_repeats(folder):
    """It draws from a stream of its own."""
    runs = [start_run(settings(folder), "grpo") for _ in range(2)]
    first, second = runs[0].measure(), runs[0].measure()
    assert first == second
    for run in runs:
        sampled_step(run)
    for one, other in zip(*(run.policy.parameters() for run in runs), strict=True):
        assert torch.equal(one, other)


# --- resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--lora-rank", "2")], ids=["all weights", "lora"])
def test_four_steps_are_two_a_resume_and_two(folder, tmp_path, more):
    """Bit for bit: weights, memory, optimiser and rows, but for the row that the first stop added."""
    method = ("--methods", "grpo+iac+dlc")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert command_line.main(flags(folder, whole, "--steps", "4", *method, *more)) == 0
    assert command_line.main(flags(folder, parts, "--steps", "2", *method, *more)) == 0
    assert command_line.main(["--resume", str(parts), "--steps", "4"]) == 0
    assert rows_of(whole) == rows_of(parts)
    name = "checkpoint-grpo+iac+dlc-seed0"
    one, other = (torch.load(run / f"{name}.pt", weights_only=True) for run in (whole, parts))
    assert str(one["optimizer"]) == str(other["optimizer"]) and str(one["memory"]) == str(other["memory"])
    files = [next((run / f"{name}-step4").glob("*.safetensors")) for run in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not list(parts.glob("*-step2")) and not list(parts.glob("*.partial")), "old weights are left lying"


def test_what_was_saved_is_a_model_to_go_on_from(folder, tmp_path):
    """Weights and tokenizer: a folder for `--policy hf:`; and what the model said last, to be read."""
    out = tmp_path / "run"
    assert command_line.main(flags(folder, out, "--methods", "grpo")) == 0
    saved = out / "checkpoint-grpo-seed0-step2"
    assert command_line.main(flags(saved, tmp_path / "more", "--methods", "grpo")) == 0
    lines = (out / "completions-grpo-seed0.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    assert [row["prompt"] for row in said] == list(Sums().prompts)
    assert all(row["step"] == 2 and row["right"] in (True, False) for row in said)


def test_saving_a_step_twice_never_leaves_it_without_weights(folder, tmp_path, monkeypatch):
    """The last step is saved at its evaluation and at the end: the second time nothing is moved."""
    run = start_run(settings(folder), "grpo")
    path = tmp_path / "checkpoint-grpo-seed0.pt"
    run.save(path)
    monkeypatch.setattr(text_run, "save_model", lambda *_: pytest.fail("written again"))
    run.save(path)
    assert (tmp_path / "checkpoint-grpo-seed0-step0").is_dir()


def test_a_save_that_fails_leaves_the_old_checkpoint_its_weights(folder, tmp_path, monkeypatch):
    """At no moment does a checkpoint name weights that are not there."""
    run, path = start_run(settings(folder), "grpo"), tmp_path / "checkpoint-grpo-seed0.pt"
    run.evaluate()
    run.save(path)
    sampled_step(run)
    monkeypatch.setattr("lab.run.save_tensors", lambda *_: (_ for _ in ()).throw(UserError("disk full")))
    with pytest.raises(UserError, match="disk full"):
        run.save(path)
    again = start_run(settings(folder), "grpo")
    again.load(path)
    assert again.step == 0 and again.rows == run.rows


def test_what_is_not_known_is_blank_and_not_0(folder, tmp_path):
    """An untrained model is never right: no modes to count, and the table says so."""
    out = tmp_path / "run"
    assert command_line.main(flags(folder, out, "--methods", "grpo")) == 0
    row = rows_of(out)[-1]
    assert float(row["pass@1"]) == 0 and row["effective_modes"] == ""
    summary = json.loads((out / "summary.json").read_text())
    assert summary["grpo"]["heldout"]["effective_modes"] == {"mean": None, "low": None, "high": None}
    assert command_line.main(["--resume", str(out), "--steps", "3"]) == 0


def test_weights_that_are_gone_are_one_line(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert command_line.main(flags(folder, out, "--methods", "grpo")) == 0
    shutil.rmtree(out / "checkpoint-grpo-seed0-step2")
    capsys.readouterr()
    assert command_line.main(["--resume", str(out), "--steps", "4"]) == 2
    assert re.search(r"minirlvr: .*checkpoint-grpo-seed0-step2.*\n", capsys.readouterr().err)


# --- the user's own questions, and mistakes -------------------------------------------------------------------------


def test_a_dataset_is_trained_on(folder, dataset, tmp_path):
    out = tmp_path / "run"
    assert command_line.main(flags(folder, out, "--dataset", str(dataset), "--methods", "grpo", "--heldout", "2")) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["ceilings"]["heldout"]["effective_modes"] == 1
    assert "listed_pass@1" not in rows_of(out)[0], "bare answers are no measure of reasoning"
    assert len(rows_of(out)) == 4


@pytest.mark.parametrize(
    "more, message",
    [
        (("--dataset", "no-such-file.jsonl"), "no-such-file.jsonl cannot be read"),
        (("--methods", "exact"), "leave it out"),
        (("--layers", "3"), "leave them out"),
        (("--compile",), "--compile"),
        (("--evaluation-samples", "7"), "--evaluation-samples is 7"),
        (("--memory-start", "elsewhere"), "fresh or reference or hf:FOLDER_OR_ID"),
        (("--max-new-tokens", "2"), "max_new_tokens is 2"),
        (("--heldout", "3"), "--heldout is for --dataset"),
        (("--dtype", "float16"), "give --lora-rank too"),
        (("--task", "countdown", "--dataset", "x.jsonl"), "give one of them"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(folder, tmp_path, capsys, more, message):
    out = tmp_path / "run"
    assert command_line.main(flags(folder, out, *more)) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    "more, message",
    [
        (("--task", "countdown"), "take another model or task"),
        (("--instruction", "Speak!"), "--instruction has no effect"),
        (("--memory-start", "hf:elsewhere"), "give --memory-start fresh or reference"),
    ],
)
def test_an_exported_toy_speaks_its_own_task_alone(toy_folder, tmp_path, capsys, more, message):
    out = tmp_path / "run"
    assert command_line.main(["--policy", f"hf:{toy_folder}", "--steps", "2", "--out", str(out), *more]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('a system turn is missing') }}", "a system turn is missing"),
        ("{% for ", "take another model or task"),
        ("{% if false %}x{% endif %}", "no token of the prompt"),
        ("always the same", "two prompts have the same token ids"),
    ],
)
def test_a_chat_template_that_does_not_work_is_one_line(folder, template, message):
    tokenizer = make_tokenizer(template)
    with pytest.raises(UserError, match=message):
        make_task(settings(folder), tokenizer, (0,), 464)


@pytest.mark.parametrize("layers", [-1, 0, 200_000, "two"])
def test_a_config_of_an_impossible_size_is_one_line(folder, tmp_path, layers, capsys):
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    assert command_line.main(flags(broken, tmp_path / "run")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_dataset_that_has_changed_is_not_gone_on_with(folder, dataset, tmp_path, capsys):
    out = tmp_path / "run"
    assert command_line.main(flags(folder, out, "--dataset", str(dataset), "--methods", "grpo")) == 0
    dataset.write_text(dataset.read_text().replace("5", "7"))
    capsys.readouterr()
    assert command_line.main(["--resume", str(out), "--steps", "4"]) == 2
    assert "has changed since" in capsys.readouterr().err


def test_a_broken_row_names_its_line_before_anything_is_trained(folder, dataset, tmp_path, capsys):
    with open(dataset, "a") as file:
        file.write('{"prompt": "and this?"}\n')
    assert command_line.main(flags(folder, tmp_path / "run", "--dataset", str(dataset))) == 2
    assert "rows.jsonl, line 7" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_toy_tasks_are_known_by_their_tokenizer_alone(folder, toy_folder):
    """The same task is asked in plain language or in its own characters, whichever the tokenizer speaks."""
    for path, kind in ((folder, TextTask), (toy_folder, TASKS["sums"])):
        policy, tokenizer = load_model(str(path))
        task = make_task(settings(path), tokenizer, (0,), policy.vocab_size)
        assert type(task) is kind


def test_a_group_of_one_prompt_is_sampled_and_measured(folder):
    """More prompts asked for than there are."""
    chosen = dataclasses.replace(settings(folder), sampling=Sampling(prompts=1, group_size=2))
    run = start_run(chosen, "rloo")
    train(run)
    assert run.rows[-2]["completions"] == 4
