"""SmolLM2-135M-Instruct learns instruction items with LoRA on a CPU, merged, loaded and asked.

Run: python benchmarks/sft_smollm2.py MODEL ITEMS [--steps N] [--json PATH]

MODEL is a folder or a .gguf file of SmolLM2-135M-Instruct, ITEMS a file of rows with instruction,
input and output. Told are the loss of held-out responses before and after,
and what the merged model, loaded by plain transformers, answers.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import narrowcast as nc
from narrowcast.runs import EvalRecord, StepRecord, describe_machine
from narrowcast.workloads import build_task, load_recipe

QUESTION = "What is the capital of France?"


def main() -> None:
    """Train, merge, load, ask, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("items")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    words = [
        f"model.path={options.model}", f"data.path={options.items}", f"steps={options.steps}",
        "data.max_seq_length=256", "batch_size=2", "eval.every=0", "eval_tasks.samples=2",
        "eval_tasks.max_new_tokens=32", "health.every=0", "device=cpu",
    ]  # fmt: skip
    before = _held_out_loss(words)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        records = list(nc.train("sft/smollm2", words, out=run))
        seconds = time.perf_counter() - began
        samples = json.loads((run / "samples.json").read_text())
        answer, fits = _asked(run / "merged_model")
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    (judged,) = [record for record in records if isinstance(record, EvalRecord)]
    told = {
        "steps": options.steps,
        "seconds": seconds,
        "held_out_loss_before": before,
        "held_out_loss_after": judged.metrics["loss"],
        "first_ten_losses": sum(losses[:10]) / len(losses[:10]),
        "last_ten_losses": sum(losses[-10:]) / len(losses[-10:]),
        "merged_dtype": fits,
        "question": QUESTION,
        "answer_of_merged_model": answer,
    }
    for name, value in told.items():
        print(f"{name:>24}  {value:.4f}" if isinstance(value, float) else f"{name:>24}  {value}")
    if options.json:
        found = {**told, "samples": samples, "environment": describe_machine()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def _held_out_loss(words: list[str]) -> float:
    task = build_task(load_recipe("sft/smollm2", words).recipe, device=torch.device("cpu"))
    task.model.eval()
    with torch.no_grad():
        return task.evaluate(task.model)["loss"]


def _asked(folder: Path) -> tuple[str, str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text, str(model.dtype)


if __name__ == "__main__":
    main()
