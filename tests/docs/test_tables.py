"""Tables of the documentation hold what the code holds."""

import re
from dataclasses import fields

import pytest
from torch import nn

import narrowcast
from narrowcast import errors, numerics
from narrowcast.hardware import Hardware, Support
from narrowcast.numerics import FORMATS, BlockFormat, Format
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.policy import PRESETS, Policy
from narrowcast.precision.plan.tasks import SIZES, TASKS, optimal_precision
from narrowcast.workloads import load_recipe

NO_DEFAULT = ("workload", "steps", "batch_size", "name", "description")


def test_every_feature_has_a_place_or_is_said_to_be_missing(docs):
    rows = list(docs.table_rows(docs.DOCS / "features.md", header="| feature |"))
    assert len(rows) > 250
    for row in rows:
        assert len(row) == 2, row
        assert "not yet" in row[1] or "`" in row[1] or row[1].startswith("no:"), row


def test_a_name_in_brackets_is_in_the_file_before_it(docs):
    text = docs.prose(docs.DOCS / "features.md")
    pairs = re.findall(r"`([\w/.-]+\.py)` \(`([\w.]+)`", text)
    assert pairs
    for path, name in pairs:
        assert name.rpartition(".")[2] in docs.file_at(path).read_text(encoding="utf-8"), name


def test_the_tables_of_settings_are_complete_and_give_the_defaults(docs, tmp_path):
    bare = tmp_path / "bare.yaml"
    bare.write_text("workload: lm\nsteps: 1\nbatch_size: 1\n", encoding="utf-8")
    defaults = load_recipe(bare).resolved()
    rows = [
        row
        for page in ("reference/recipe-settings.md", "workloads/lm.md")
        for row in docs.table_rows(docs.DOCS / page, header="| setting |")
    ]
    assert {name.strip("`") for name, *_ in rows} == set(defaults)
    for name, default, _ in rows:
        key = name.strip("`")
        if key not in NO_DEFAULT:
            given = load_recipe(bare, [f"{key}={default}"]).resolved()
            assert given[key]["value"] == defaults[key]["value"], key


def test_the_table_of_presets_is_that_of_the_code(docs):
    rows = docs.table_rows(docs.DOCS / "concepts/policy.md", header="| preset |")
    shown = {name.strip("`"): rest for name, *rest in rows}
    shown.pop("auto", None)
    assert list(shown) == list(PRESETS)
    for name, (roles, *scaled) in shown.items():
        same_as = re.fullmatch(r"as `(.*)`", roles)
        meant = str(PRESETS[same_as[1]]) if same_as else roles.strip("`")
        assert meant == str(PRESETS[name])
        assert scaled in ([], ["yes" if PRESETS[name].needs_loss_scale else "no"])


def test_the_table_of_roles_names_every_role(docs):
    rows = docs.table_rows(docs.DOCS / "concepts/policy.md", header="| role |")
    roles = [field.name for field in fields(Policy) if field.name != "exceptions"]
    assert [name.strip("`") for name, *_ in rows] == roles


def test_the_table_of_formats_has_their_numbers(docs):
    rows = docs.table_rows(docs.DOCS / "concepts/formats.md", header="| name | exponent")
    shown = {name.strip("`"): rest for name, *rest in rows}
    assert list(shown) == [name for name, known in FORMATS.items() if isinstance(known, Format)]
    for name, (exponent, mantissa, *numbers, dtype) in shown.items():
        known = FORMATS[name]
        assert (int(exponent), int(mantissa)) == (known.exponent_bits, known.mantissa_bits)
        exact = (known.largest, known.smallest_normal, known.smallest, known.epsilon)
        # Three significant digits are shown.
        assert [float(n) for n in numbers] == pytest.approx(exact, rel=5e-3)
        assert dtype.strip("`") == ("none" if known.dtype is None else str(known.dtype))


def test_the_table_of_block_formats_has_their_numbers(docs):
    rows = list(docs.table_rows(docs.DOCS / "concepts/formats.md", header="| name | element"))
    blocks = {name: known for name, known in FORMATS.items() if isinstance(known, BlockFormat)}
    assert [name.strip("`") for name, *_ in rows] == list(blocks)
    for name, element, block, _, bits in rows:
        known = blocks[name.strip("`")]
        assert (element.strip("`"), int(block)) == (known.element.name, known.block)
        assert float(bits) == known.bits


def test_the_bytes_a_weight_are_those_of_the_plan(docs):
    machine = Hardware(device="cpu", name="any", memory_bytes=0)
    rows = list(docs.table_rows(docs.DOCS / "guides/master-weights.md", header="| policy | weight"))
    assert rows
    for policy, *shown in rows:
        counted = make_plan(
            nn.Linear(16, 16, bias=False), policy.strip("`"), hardware=machine
        ).bytes
        each = [counted[role] // 256 for role in ("params", "grads", "master", "moments")]
        assert [int(n) for n in shown] == [*each, sum(each)], policy


def test_the_exit_codes_are_those_of_the_errors(docs):
    named = vars(errors)
    rows = list(docs.table_rows(docs.DOCS / "reference/errors.md", header="| code |"))
    pairs = [(int(code), name) for code, _, text in rows for name in docs.IN_CODE.findall(text)]
    assert len(pairs) == 6
    for code, name in pairs:
        assert named[name].exit_code == code


def test_the_reference_has_every_public_name(docs):
    pages = (docs.DOCS / "reference").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = set(re.findall(r"^(?:::: | +heading: )([\w.]+)$", text, re.MULTILINE))
    public = {f"narrowcast.{name}" for name in narrowcast.__all__ if name != "__version__"}
    # A format's own name (E4M3) needs no entry: the formats have a table.
    public |= {f"narrowcast.numerics.{name}" for name in numerics.__all__ if not name.isupper()}
    assert public - {"narrowcast.numerics.Per"} <= shown


TASKS_PAGE = "concepts/precision-by-task.md"


def test_the_table_of_tasks_is_that_of_the_code(docs):
    shown = {
        name.strip("`"): rest
        for name, *rest in docs.table_rows(docs.DOCS / TASKS_PAGE, header="| task | wants")
    }
    assert shown == {
        name: [
            row.wants,
            "none" if row.clip_norm is None else str(row.clip_norm),
            str(row.growth_interval),
            row.activation_checkpointing,
            f"{' and '.join(row.offload)}, from {row.offload_from}" if row.offload else "none",
            row.reason,
        ]
        for name, row in TASKS.items()
    }


def test_the_table_of_what_tasks_get_is_what_they_get(docs):
    native = Support(how="native", reason="it does")
    machines = [
        ("cpu", None, ()),
        ("cpu", None, ("bf16",)),
        ("cuda:0", (6, 1), ()),
        ("cuda:0", (7, 0), ("fp16",)),
        ("cuda:0", (8, 0), ("fp16", "bf16")),
        ("cuda:0", (8, 9), ("fp16", "bf16", "e4m3", "e5m2")),
        ("cuda:0", (9, 0), ("fp16", "bf16", "e4m3", "e5m2")),
        ("mps", None, ("fp16", "bf16")),
    ]
    wanting = {row.wants: name for name, row in reversed(TASKS.items())}
    rows = list(docs.table_rows(docs.DOCS / TASKS_PAGE, header="| wants | size"))
    assert [row[0] for row in rows] == ["fp8", "fp8", "bf16", "fp16"]
    for wants, sizes, *policies in rows:
        for size in SIZES if sizes == "any" else sizes.split(", "):
            for (device, capability, formats), policy in zip(machines, policies, strict=True):
                hardware = Hardware(
                    device=device,
                    name="a machine",
                    memory_bytes=80 * 2**30,
                    capability=capability,
                    products=dict.fromkeys(formats, native),
                )
                assert optimal_precision(wanting[wants], size, hardware).policy == policy
