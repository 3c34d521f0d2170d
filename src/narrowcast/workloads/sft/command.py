"""`narrowcast ica`: find, show and test functional networks of a language model."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click

from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.runs.writing import explain_write_error, replace_file
from narrowcast.workloads.sft.ica.settings import SKIP_FIRST

if TYPE_CHECKING:
    from narrowcast.workloads.sft.ica.selection import Selector
    from narrowcast.workloads.sft.ica.study.documents import Documents


LINE_SECONDS = 2.0
"""Between progress lines if stderr is not a terminal."""
CONTEXT = 512
"""Tokens per document, unless the model's context is shorter."""
SELECTORS = ("percentile", "zscore", "top_k")
DTYPES = ["float32", "float16", "bfloat16"]
_SHARED = (
    click.argument("model"),
    click.argument("data", nargs=-1, required=True),
    click.option("--samples", type=click.IntRange(1), default=100, help="Number of documents."),
    click.option("--tokens", type=click.IntRange(2), help="Maximum tokens of all documents."),
    click.option(
        "--max-length",
        type=click.IntRange(2),
        help=f"Maximum tokens per document.  [default: {CONTEXT}, or the model's context]",
    ),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Random seed."),
    click.option("--device", default="auto", help="cpu, cuda, cuda:1, …"),
    click.option("--model-dtype", type=click.Choice(DTYPES), default="float32"),
)


def device_named(name: str) -> str:
    """Return the device, or raise if it is not available."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines()[0]
        raise ConfigError(
            f"--device {name} is not available: {text}. Write auto, cpu or cuda."
        ) from None
    return name


def make_selector(options: Mapping[str, Any]) -> "Selector":
    """Return the selector from --percentile, --zscore or --top-k."""
    from narrowcast.workloads.sft.ica.selection import selector_from

    named = [name for name in SELECTORS if options[name] is not None]
    if len(named) > 1:
        terms = " and ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ConfigError(f"{terms} cannot be combined. Keep one.")
    if options["two_sided"] and options["zscore"] is None:
        raise ConfigError("--two-sided needs --zscore. Add --zscore, or leave --two-sided out.")
    return selector_from(**{name: options[name] for name in (*SELECTORS, "two_sided")})


def numbers_in(text: str | None) -> list[int] | None:
    """Return the listed components, or None for all."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--components must be numbers separated by commas, such as 0,2, got {text}."
        ) from None


def output_path(name: str) -> Path:
    """Return the output path, or raise if it cannot be written."""
    path = expand_path(name)
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{name} cannot be written: {why}. Write a file in an existing folder.")
    return path


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {explain_write_error(error)}.") from None


@click.command(context_settings={"show_default": True})
@click.argument("run")
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@click.option("--limit", type=click.IntRange(1), help="Documents per task.  [default: all]")
@click.option(
    "--num-fewshot", type=click.IntRange(0), help="Examples per prompt.  [default: the task's]"
)
@click.option("--batch-size", type=click.IntRange(1), default=8, help="Requests per batch.")
@click.option("--include-path", metavar="DIR", help="Folder with your own tasks, as YAML.")
@click.option("--device", default="auto", help="cpu, cuda, cuda:1, …")
@click.option("--model-dtype", type=click.Choice(DTYPES), default="float32")
def lm_eval(
    run: str, tasks: tuple[str, ...], device: str, model_dtype: str, **options: Any
) -> None:
    """Evaluate the model of a finished fine-tuning RUN on tasks of lm-eval.

    Writes lm_eval.json in the run folder. Needs pip install lm-eval, which downloads the data of
    its tasks from the Hugging Face Hub.
    """
    import torch

    from narrowcast.workloads.sft.judge.lm_eval import evaluate_with_lm_eval, results_path

    results = evaluate_with_lm_eval(
        run, tasks, device=device_named(device), dtype=getattr(torch, model_dtype), **options
    )
    for task, values in results.items():
        for name, value in values.items():
            if "_stderr" not in name:
                error = values.get(f"{name}_stderr")
                spread = "" if error is None else f" ± {error:.4f}"
                click.echo(f"{task}  {name} {value:.4f}{spread}")
    click.echo(f"wrote {results_path(run)}")


@click.group(context_settings={"show_default": True})
def ica() -> None:
    """Find, show and test functional networks of a language model."""


def _shared(command: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments and options of both commands that run a model."""
    for option in reversed(_SHARED):
        command = option(command)
    return command


@ica.command()
@click.option("-o", "--output", default="networks.json", help="File to write.")
@click.option("--components", type=click.IntRange(1), default=5, help="Number of components.")
@click.option("--percentile", type=float, help="Select channels at or above it.  [default: 98]")
@click.option("--zscore", type=float, help="Instead: standard deviations above the mean.")
@click.option("--two-sided", is_flag=True, help="With --zscore: also as far below the mean.")
@click.option("--top-k", type=int, help="Instead: number of channels per component.")
@click.option("--layers", help="Such as 0,3,7 or 0:4,9:.  [default: all]")
@click.option(
    "--dtype",
    type=click.Choice(["none", "auto", *DTYPES]),
    default="none",
    help="Dtype in which signals are stored.",
)
@click.option("--site", type=click.Choice(["mlp_output", "down_input"]), default="mlp_output")
@click.option("--solver", type=click.Choice(["picard", "parallel", "deflation"]), default="picard")
@click.option("--restarts", type=click.IntRange(1), default=4, help="Random initialisations.")
@click.option("--max-iter", type=click.IntRange(1), default=200, help="Maximum iterations.")
@click.option(
    "--skip-first",
    type=click.IntRange(0),
    default=SKIP_FIRST,
    help="Tokens to skip at the start of each document (attention sinks).",
)
@click.option(
    "--clip-activations",
    type=float,
    help="Clip channels to their percentiles 100 - p and p, such as 99.  [default: none]",
)
@click.option(
    "--standardise/--no-standardise", default=True, help="Scale every channel to variance 1."
)
@click.option(
    "--bootstrap",
    type=click.IntRange(0),
    default=0,
    help="Also find networks this many times in documents drawn with replacement.",
)
@click.option("--html", help="Write an HTML page with charts of the networks.")
@_shared
def build(model: str, data: tuple[str, ...], output: str, html: str | None, **options: Any) -> None:
    """Find the functional networks of MODEL on DATA and write them to a file.

    MODEL is a folder, a .gguf file, a name on the Hugging Face Hub, or tiny. DATA is .txt files, or
    .json, .jsonl, .csv and .parquet files of conversations, plain or .gz.
    """
    target, place = output_path(output), None if html is None else output_path(html)
    selector = make_selector(options)  # checked before slow work
    from narrowcast.workloads.sft.ica.entry import functional_networks
    from narrowcast.workloads.sft.ica.ica import ICA
    from narrowcast.workloads.sft.ica.networks import Provenance
    from narrowcast.workloads.sft.ica.networks_file import networks_to_json
    from narrowcast.workloads.sft.ica.page import networks_section, page, resampled_section
    from narrowcast.workloads.sft.ica.study.documents import model_inputs
    from narrowcast.workloads.sft.ica.study.driving import bootstrap
    from narrowcast.workloads.sft.ica.text import network_lines, resampled_rows, table

    analysis = ICA(
        components=options["components"],
        ica_dtype=None if options["dtype"] == "none" else options["dtype"],
        solver=options["solver"],
        restarts=options["restarts"],
        max_iter=options["max_iter"],
        clip_activations=options["clip_activations"],
        seed=options["seed"],
        standardise=options["standardise"],
    )
    loaded, drawn = _loaded(model, data, options, layers=options["layers"])
    inputs = model_inputs(drawn.documents)
    meter = _Meter("reading documents:", inputs)
    find = partial(
        functional_networks,
        loaded,
        ica=analysis,
        selector=selector,
        layers=options["layers"],
        site=options["site"],
        skip_first=options["skip_first"],
        provenance=Provenance(model=model, data=drawn.named),
    )
    networks = find(meter)
    meter.end()
    write(target, networks_to_json(networks))
    lines, drawings = network_lines(networks), [networks_section(networks)]
    if options["bootstrap"]:
        meter = _Meter("resampling:")
        resampled = bootstrap(
            networks,
            inputs,
            find,
            resamples=options["bootstrap"],
            seed=options["seed"],
            progress=meter.at,
        )
        meter.end()
        lines += ["", *table(*resampled_rows(resampled))]
        drawings.append(resampled_section(resampled))
    if place is not None:
        write(place, page(f"Functional networks of {model}", drawings))
    written = [f"written to {each}" for each in (target, place) if each is not None]
    click.echo("\n".join([*lines, "", *written]))


@ica.command()
@click.option("--networks", "file", required=True, help="File written by `narrowcast ica build`.")
@click.option("-o", "--output", help="JSON file to write the tokens to.")
@click.option("--most", type=click.IntRange(1), default=8, help="Tokens per component.")
@click.option(
    "--least-count", type=click.IntRange(1), default=3, help="Occurrences that a token needs."
)
@click.option("--html", help="Write an HTML page with the tokens and their contexts.")
@_shared
def tokens(
    model: str, data: tuple[str, ...], file: str, output: str | None, html: str | None, **more: Any
) -> None:
    """Show the tokens of DATA that drive each network of MODEL."""
    places = {name: output_path(each) for name, each in (("json", output), ("html", html)) if each}
    from narrowcast.runs import strict_json
    from narrowcast.workloads.sft.ica.entry import check_fit
    from narrowcast.workloads.sft.ica.networks_file import load_networks
    from narrowcast.workloads.sft.ica.page import driving_section, networks_section, page
    from narrowcast.workloads.sft.ica.study.driving import driving_tokens
    from narrowcast.workloads.sft.ica.text import driving_lines
    from narrowcast.workloads.sft.models.loading import load_tokenizer

    networks = load_networks(expand_path(file))
    loaded, drawn = _loaded(model, data, more)
    check_fit(networks, loaded)
    counts = {"most": more["most"], "least_count": more["least_count"]}
    drivers = driving_tokens(loaded, drawn.documents, networks, **counts)
    tokenizer = load_tokenizer(model)
    driving = [each.to_json(tokenizer) for each in drivers]
    if "json" in places:
        text = strict_json.dumps({"model": model, "data": drawn.named, "components": driving})
        write(places["json"], text + "\n")
    if "html" in places:
        drawings = [driving_section(driving), networks_section(networks)]
        write(places["html"], page(f"Functional networks of {model}", drawings))
    written = [f"written to {each}" for each in places.values()]
    click.echo("\n".join([*driving_lines(driving), *written]))


@ica.command()
@click.argument("file")
@click.option("--html", help="Write an HTML page with charts of the networks.")
def show(file: str, html: str | None) -> None:
    """Show the networks in FILE."""
    from narrowcast.workloads.sft.ica.networks_file import load_networks
    from narrowcast.workloads.sft.ica.page import networks_section, page
    from narrowcast.workloads.sft.ica.text import network_lines

    target = None if html is None else output_path(html)
    networks = load_networks(expand_path(file))
    click.echo("\n".join(network_lines(networks)))
    if target is not None:
        write(target, page(f"Functional networks in {file}", [networks_section(networks)]))
        click.echo(f"\nwritten to {target}")


@ica.command()
@click.option("--networks", "file", required=True, help="File written by `narrowcast ica build`.")
@click.option("-o", "--output", help="JSON file to write the results to.")
@click.option("--components", help="Components to test, such as 0,2.  [default: all]")
@click.option(
    "--random",
    "masks",
    type=click.IntRange(1),
    default=39,
    help="Random masks; testing N networks one by one needs about 40 x N.",
)
@click.option(
    "--share", type=float, default=0.15, help="Share of channels in the larger random masks."
)
@click.option("--each/--no-each", default=True, help="Also test networks one by one.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--html", help="Write an HTML page with charts of the results.")
@_shared
def ablate(
    model: str, data: tuple[str, ...], file: str, output: str | None, html: str | None, **more: Any
) -> None:
    """Test whether networks of MODEL matter more than random channels.

    Measures the next-token loss on DATA with networks silenced, with as many random channels per
    layer silenced, with a larger random share silenced, and with only the networks kept.
    """
    places = {name: output_path(each) for name, each in (("json", output), ("html", html)) if each}
    from narrowcast.runs import strict_json
    from narrowcast.workloads.sft.ica.entry import check_fit
    from narrowcast.workloads.sft.ica.networks_file import load_networks
    from narrowcast.workloads.sft.ica.page import ablation_section, networks_section, page
    from narrowcast.workloads.sft.ica.study.ablate import ablate as measure
    from narrowcast.workloads.sft.ica.text import ablation_lines

    networks = load_networks(expand_path(file))
    chosen = numbers_in(more["components"])
    networks.channels(chosen)  # raises for components that do not exist
    loaded, drawn = _loaded(model, data, more)
    check_fit(networks, loaded)
    meter = _Meter("measuring:")
    ablation = measure(
        loaded,
        drawn.documents,
        networks,
        components=chosen,
        random_masks=more["masks"],
        share=more["share"],
        one_by_one=more["each"],
        seed=more["seed"],
        data=drawn.named,
        name=model,
        progress=meter.at,
    )
    meter.end()
    text = strict_json.dumps(ablation.to_json(), indent=1) + "\n"
    if "json" in places:
        write(places["json"], text)
    if "html" in places:
        drawings = [ablation_section(ablation), networks_section(networks)]
        write(places["html"], page(f"Functional networks of {model}", drawings))
    written = [f"written to {path}" for path in places.values()]
    lines = [text.rstrip()] if more["as_json"] else [*ablation_lines(ablation), *written]
    click.echo("\n".join(lines))


@ica.command()
@click.argument("model")
@click.argument("tasks", nargs=-1)
@click.option(
    "--methods",
    default="full,lora,freeze,lesion,preserve",
    help="Ways to train, separated by commas.",
)
@click.option("--networks", "file", help="File of `narrowcast ica build`.  [default: found first]")
@click.option("--steps", type=click.IntRange(1), default=100, help="Steps per task.")
@click.option("--batch-size", type=click.IntRange(1), default=16, help="Rows per step.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=1e-3, help="Learning rate.")
@click.option("--lora-r", type=click.IntRange(1), default=8, help="Rank of the adapter.")
@click.option("--questions", type=click.IntRange(1), default=50, help="Questions per task.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=16, help="Tokens of an answer.")
@click.option("--max-length", type=click.IntRange(2), default=128, help="Tokens of a row.")
@click.option("--seeds", type=click.IntRange(1), default=1, help="Runs per method.")
@click.option("--text", help="Plain text whose loss is measured before and after.")
@click.option("--policy", default="fp32", help="Precision policy of training.")
@click.option("--device", default="auto", help="cpu, cuda, cuda:1, …")
@click.option("-o", "--output", help="JSON file to write the results to.")
@click.option("--html", help="Write an HTML page with tables and charts.")
def continual(model: str, tasks: tuple[str, ...], **options: Any) -> None:
    """Train MODEL on TASKS one after another, and measure what it forgets.

    A task is a file of questions and answers. Without tasks, the package makes three about letters:
    sound, half and parity. A fifth of the rows of a task is held out.
    """
    named = {"json": options["output"], "html": options["html"]}
    places = {name: output_path(each) for name, each in named.items() if each}
    from narrowcast.workloads.sft.ica.study.continual import METHODS

    methods = [name.strip() for name in options["methods"].split(",")]
    if unknown := [name for name in methods if name not in METHODS]:
        raise ConfigError(f"--methods must be some of {', '.join(METHODS)}, got {unknown[0]}.")
    _continual(model, tasks, methods, options, places)


def _continual(
    model: str,
    tasks: Sequence[str],
    methods: Sequence[str],
    options: Mapping[str, Any],
    places: Mapping[str, Path],
) -> None:
    from narrowcast.plain_files import read_plain
    from narrowcast.runs import strict_json
    from narrowcast.workloads.sft.data.templates import select_template
    from narrowcast.workloads.sft.ica.entry import check_fit, functional_networks
    from narrowcast.workloads.sft.ica.networks_file import load_networks
    from narrowcast.workloads.sft.ica.page import continual_section, page
    from narrowcast.workloads.sft.ica.study import continual as study
    from narrowcast.workloads.sft.ica.text import table
    from narrowcast.workloads.sft.judge.perplexity import perplexity
    from narrowcast.workloads.sft.models.loading import load_model, load_tokenizer

    device, length = device_named(options["device"]), options["max_length"]
    template = select_template("auto", load_tokenizer(model))
    files = [name if name in study.MADE else str(expand_path(name)) for name in tasks]
    loaded = [
        study.load_task(name, template, most_questions=options["questions"], max_length=length)
        for name in files or study.MADE
    ]
    text = None if options["text"] is None else read_plain(expand_path(options["text"])).decode()

    def fresh() -> Any:
        return load_model(model, device=device).float()

    def nats(trained: Any) -> float:
        measured = perplexity(trained, template.tokenizer, text or "", length=length, batch_size=8)
        return measured.nats

    channels, site = {}, "mlp_output"
    if set(methods) & set(study.NEEDS_NETWORKS):
        base = fresh()
        if options["file"] is not None:
            networks = load_networks(expand_path(options["file"]))
            check_fit(networks, base)
        else:
            rows = [task.train.rows.row(n)[0] for task in loaded for n in range(20)
                    if n < len(task.train)]  # fmt: skip
            networks = functional_networks(base, study.as_batches(rows, device=device))
        channels, site = networks.channels(), networks.layout.site
        count = sum(map(len, channels.values()))
        click.echo(
            f"networks: {count:,} channels of {len(networks.components)} components", err=True
        )
    training = study.TaskTraining(
        steps=options["steps"],
        batch_size=options["batch_size"],
        lr=options["lr"],
        lora_r=options["lora_r"],
        policy=options["policy"],
        max_new_tokens=options["max_new_tokens"],
    )
    results = []
    for method in methods:
        for seed in range(options["seeds"]):
            meter = _Meter(f"{method}, seed {seed}, tasks:")
            result = study.continual(
                fresh,
                template,
                loaded,
                method=method,  # type: ignore[arg-type]  # checked
                channels=channels,
                site=site,  # type: ignore[arg-type]
                training=training,
                seed=seed,
                nats=None if text is None else nats,
                progress=meter.at,
            )
            meter.end()
            results.append(result)
    lines = table(*study.summary(results))
    if "json" in places:
        rows_json = [each.to_json() for each in results]
        figures = {"model": model, "training": training.to_json(), "results": rows_json}
        write(places["json"], strict_json.dumps(figures, indent=1) + "\n")
    if "html" in places:
        title = f"What {model} forgets"
        write(places["html"], page(title, [continual_section(results)]))
    written = [f"written to {each}" for each in places.values()]
    click.echo("\n".join([*lines, *written]))


@final
class _Meter:
    """Progress on stderr: one line on a terminal, a line every few seconds elsewhere."""

    def __init__(self, what: str, batches: Sequence[Any] = ()) -> None:
        self._what, self._batches, self._said = what, batches, time.monotonic()
        self._live, self._drawn = sys.stderr.isatty(), False

    def __iter__(self) -> Iterator[Any]:
        for done, batch in enumerate(self._batches, start=1):
            yield batch
            self.at(done, len(self._batches))

    def at(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said < (0.2 if self._live else LINE_SECONDS):
            return
        self._said, self._drawn = now, True
        text = f"{self._what} {done}/{total}"
        click.echo(f"\r{text}" if self._live else text, err=True, nl=not self._live)

    def end(self) -> None:
        if self._live and self._drawn:
            click.echo(f"\r{' ' * 40}\r", err=True, nl=False)


def _loaded(
    model: str,
    data: Sequence[str],
    options: dict[str, Any],
    *,
    layers: str | None = None,
) -> "tuple[Any, Documents]":
    """Load a model and draw documents; cheap checks come first."""
    import torch

    from narrowcast.workloads.sft.ica.blocks import find_blocks
    from narrowcast.workloads.sft.ica.networks import parse_layers
    from narrowcast.workloads.sft.ica.study.documents import (
        check_documents,
        check_tokens,
        draw_documents,
    )
    from narrowcast.workloads.sft.models.loading import context_length, load_model, load_tokenizer

    check_documents(data)
    tokenizer = load_tokenizer(model)
    shape = load_model(model, device="meta")
    parse_layers(layers, find_blocks(shape).depth)
    context, length = context_length(shape), options["max_length"]
    if context is not None and length is not None and length > context:
        raise ConfigError(
            f"--max-length must be at most {context}, the context length of {model}, got {length}. "
            f"Write {context} or less."
        )
    drawn = draw_documents(
        data,
        tokenizer,
        samples=options["samples"],
        max_length=length or min(CONTEXT, context or CONTEXT),
        tokens=options["tokens"],
        seed=options["seed"],
    )
    if not drawn.documents:
        raise ConfigError(
            f"--tokens {options['tokens']} leaves no documents. Write a larger number."
        )
    check_tokens(drawn.documents, shape)
    count = f"{len(drawn.documents)} of {drawn.available} documents, {drawn.tokens:,} tokens"
    click.echo("\n".join([*drawn.notes, f"using {count}"]), err=True)
    dtype = getattr(torch, options["model_dtype"])
    return load_model(model, dtype=dtype, device=device_named(options["device"])).eval(), drawn
