"""The commands of docs/workloads/genomics-commands.md, typed one after another."""

import random
import re
import shlex
from pathlib import Path

from narrowcast.cli.entry import run_command

PAGE = Path(__file__).parents[3] / "docs/workloads/genomics-commands.md"
SMALL = [
    "epochs=null", "steps=2", "data.max_length=64", "device=cpu", "precision.task=null",
    "eval.every=2",
]  # fmt: skip


def make_files(home):
    letters = random.Random(0)
    genome = "".join(letters.choices("ACGT", k=1500))
    (home / "genome.fa").write_text(f">chr1\n{genome}\n")
    (home / "plasmid.fa").write_text(f">p\n{genome[:400][::-1]}\n")
    (home / "contig.fa").write_text(f">contig\n{genome[100:300]}\n")
    (home / "genes.gff").write_text(
        "##gff-version 3\n" + "".join(
            f"chr1\tx\tgene\t{start}\t{start + 50}\t.\t+\t.\tID=g{start}\n"
            for start in range(50, 1400, 100)
        )
    )  # fmt: skip
    rows = []
    for at in range(100, 1400, 20):
        old = genome[at - 1]
        new = "ACGT"[("ACGT".index(old) + 1) % 4]
        rows.append(f"chr1,{at},{old},{new},{'benign' if at % 40 else 'pathogenic'}")
    (home / "variants.csv").write_text("\n".join(["chrom,pos,ref,alt,label", *rows]))
    (home / "new.csv").write_text("\n".join(["chrom,pos,ref,alt,label", *rows[:5]]))


def test_commands_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    shown = re.findall(r"(?ms)^```bash\n(.*?)^```$", PAGE.read_text())
    commands = [shlex.split(line)[1:] for line in shown[0].splitlines()]
    assert len(commands) == 7
    for words in commands:
        training = words[0] == "train" or words[1] == "pretrain"
        new = [] if any(word.startswith("model.path") for word in words) else ["model.width=16"]
        small = [*SMALL, *new, "--quiet"] if training else []
        assert run_command([*words, *small]) == 0, words
    assert len((tmp_path / "predicted.csv").read_text().splitlines()) == 6
    assert (tmp_path / "genes_found.gff").read_text().startswith("##gff-version 3\n")
    assert "AUROC" in capsys.readouterr().out
