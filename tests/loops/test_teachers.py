"""Distillation: a frozen teacher beside the student, or inside one module with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

STEPS = 8
GENERATOR = torch.Generator().manual_seed(5)
INPUTS = torch.randn(STEPS, 16, 12, generator=GENERATOR)


def parts():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
    student = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    return teacher.eval().requires_grad_(False), student, optimizer


def soft_loss(student, teacher, x):
    with torch.no_grad():
        wanted = F.softmax(teacher(x).float() / 2, dim=1)
    return F.kl_div(F.log_softmax(student(x).float() / 2, dim=1), wanted, reduction="batchmean")


def plain_distillation(trained):
    teacher, student, optimizer = parts()
    losses = []
    for x in INPUTS:
        loss = soft_loss(student, teacher, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [student, teacher], [optimizer])


def distillation(trained, *, teacher_is, **settings):
    teacher, student, optimizer = parts()
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    run = nc.prepare(both if teacher_is == "inside" else student, optimizer, **settings)
    losses = []
    for x in INPUTS:
        with run.autocast():
            loss = soft_loss(student, teacher, x)
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return trained(losses, [student, teacher], [optimizer])


@pytest.mark.parametrize("teacher_is", ["inside", "outside"])
def test_distillation_in_fp32_is_the_plain_one(trained, same, teacher_is):
    mine = distillation(trained, teacher_is=teacher_is, policy="fp32")
    same(mine, plain_distillation(trained))


@pytest.mark.parametrize("teacher_is", ["inside", "outside"])
def test_distillation_trains_in_a_narrow_policy(trained, near, narrow_or_params, teacher_is):
    mine = distillation(trained, teacher_is=teacher_is, **narrow_or_params)
    near(mine, plain_distillation(trained), products=4, **narrow_or_params)


def test_a_teacher_in_bf16_from_the_start_stays_so_and_teaches(trained):
    teacher, student, optimizer = parts()
    teacher.bfloat16()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    run = nc.prepare(both, optimizer, policy="fp32")
    for x in INPUTS:
        with torch.no_grad():
            wanted = teacher(x.bfloat16()).float().softmax(1)
        with run.autocast():
            loss = F.cross_entropy(student(x), wanted)
        assert run.step(loss).applied
    after = teacher.state_dict()
    assert all(v.dtype == after[k].dtype and torch.equal(v, after[k]) for k, v in before.items())
