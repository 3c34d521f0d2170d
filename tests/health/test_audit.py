"""An audit of one step against dtypes that torch, accelerate, Lightning and peft decide."""

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import narrowcast as nc
from narrowcast.errors import ConfigError


def mlp(width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 10))


def data(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 16, generator=generator), torch.arange(rows) % 10


def adamw(model, lr=1e-3):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def plain_step(model, optimizer, loss_fn=None, *, autocast=None):
    x, y = data()

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = F.cross_entropy(model(x), y) if loss_fn is None else loss_fn()
        loss.backward()
        optimizer.step()

    return step


def audited(model, loss_fn=None, *, autocast=None, optimizer=None, **settings):
    optimizer = adamw(model) if optimizer is None else optimizer
    step = plain_step(model, optimizer, loss_fn, autocast=autocast)
    return nc.audit(model, optimizer, step, **settings)


def kinds(audit):
    return {finding.kind for finding in audit.findings}


def finding(audit, kind):
    return next(each for each in audit.findings if each.kind == kind)


def test_fp32_loop_has_no_findings_and_steps_as_without_the_audit():
    model, twin = mlp(), mlp()
    audit = audited(model)
    plain_step(twin, adamw(twin))()
    assert audit.findings == ()
    assert audit.flop_shares == {"fp32": 1.0}
    row = audit.row("0")
    assert (row.kind, row.forward, row.backward) == ("linear", ("fp32",), ("fp32",))
    assert (row.weight, row.gradient, row.moments) == (("fp32",), ("fp32",), ("fp32",))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    size = sum(p.numel() * 4 for p in model.parameters())
    assert audit.bytes == {"weights": size, "gradients": size, "masters": 0, "moments": 2 * size}


def test_audit_leaves_no_hooks_behind():
    model = mlp()
    audited(model)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert callable(nc.audit)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_autocast_products_have_its_dtype_and_weights_stay_fp32(dtype, name):
    audit = audited(mlp(), autocast=dtype)
    for module in ("0", "3"):
        row = audit.row(module)
        assert (row.forward, row.backward, row.weight) == ((name,), (name,), ("fp32",))
        assert row.gradient == ("fp32",)
    assert audit.flop_shares == {name: 1.0}
    assert kinds(audit) <= {"no loss scale"}


def test_product_flops_equal_those_of_the_torch_flop_counter():
    from torch.utils.flop_counter import FlopCounterMode

    from narrowcast.health.step_observer import observe

    model = mlp()
    optimizer = adamw(model)
    with FlopCounterMode(display=False) as counter:
        plain_step(model, optimizer)()
    seen = observe(model, list(model.parameters()), plain_step(model, optimizer))
    assert sum(sum(p.flops.values()) for p in seen.products.values()) == counter.get_total_flops()


def test_fp32_layer_among_bf16_products_is_reported_with_its_name():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp(), nn.Linear(10, 10)

        def forward(self, x):
            x = self.body(x)
            with torch.autocast("cpu", enabled=False):
                return self.head(x.float())

    model = Mixed()
    audit = audited(model, autocast=torch.bfloat16)
    wide = finding(audit, "wide products")
    assert wide.where == "head"
    assert audit.row("head").forward == audit.row("head").backward == ("fp32",)


def test_expected_dtype_reports_every_wider_product():
    audit = audited(mlp(), expected="bf16")
    assert finding(audit, "wide products").where == "0, 3"
    assert kinds(audited(mlp(), autocast=torch.bfloat16, expected=torch.bfloat16)) == set()
    assert kinds(audited(mlp(), expected="float32")) == set()


def test_accelerate_bf16_model_has_no_master_weights():
    # accelerate #3979: mixed precision promises fp32 master weights, the weights stay bf16.
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = mlp().to(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, adamw(model))
    x, y = data()

    def step():
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    audit = nc.audit(model, optimizer, step)
    assert {"no master weights", "narrow moments"} <= kinds(audit)
    assert "6 trainable weights" in finding(audit, "no master weights").what


def test_accelerate_fp32_model_has_no_findings():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = mlp()
    model, optimizer = accelerator.prepare(model, adamw(model))
    x, y = data()

    def step():
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    audit = nc.audit(model, optimizer, step, expected="bf16")
    assert audit.findings == ()
    assert audit.flop_shares == {"bf16": 1.0}


def test_weights_that_lightning_initialises_in_bf16_are_reported_after_an_upcast():
    # Lightning #21556: weights are created under a bf16 default dtype, and trained in fp32.
    fabric = pytest.importorskip("lightning.fabric")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin = fabric.plugins.HalfPrecision("bf16-true")
    with plugin.module_init_context():
        model = mlp()
    assert model[0].weight.dtype == torch.bfloat16
    model.float()
    audit = audited(model, autocast=torch.bfloat16)
    assert kinds(audit) == {"weights on a narrow grid"}
    grid = finding(audit, "weights on a narrow grid")
    # The norm has ones and zeros, and the biases have few values: they prove nothing.
    assert grid.where == "0.weight, 3.weight"
    assert "all values of 2 fp32 weights are exactly representable in bf16" in grid.what


def test_lightning_trainer_step_is_seen_through_its_closure():
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer

    task = Task()
    optimizer = adamw(task.net)
    loader = torch.utils.data.DataLoader([*zip(*data(), strict=True)], batch_size=8)

    def step():
        trainer = lightning.Trainer(
            max_steps=1, accelerator="cpu", precision="bf16-mixed", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(task, loader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        audit = nc.audit(task, optimizer, step)
    assert audit.row("net.0").forward == audit.row("net.0").backward == ("bf16",)
    assert audit.findings == ()


def test_bf16_adamw_from_one_loses_every_update():
    model = nn.Linear(16, 10, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    x, y = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    audit = audited(
        model, lambda: F.cross_entropy(model(x.bfloat16()).float(), y), optimizer=optimizer
    )
    assert bool((model.weight == 1).all())  # 1 - 1e-3 rounds to 1 in bf16
    assert {"no master weights", "lost updates"} <= kinds(audit)
    assert "160 of 160 elements" in finding(audit, "lost updates").why


@pytest.mark.parametrize(
    ("policy", "forward", "backward"),
    [
        ("fp32", "fp32", "fp32"),
        ("bf16", "bf16 emulated", "bf16 emulated"),
        ("bf16, params=bf16, master=split", "bf16 emulated", "bf16 emulated"),
        ("bf16, params=bf16, master=kahan", "bf16 emulated", "bf16 emulated"),
        ("bf16, params=bf16, master=fp32", "bf16 emulated", "bf16 emulated"),
        ("bf16, params=bf16, master=stochastic", "bf16 emulated", "bf16 emulated"),
        ("fp16", "fp16 emulated", "fp16 emulated"),
        ("fp8-tensor", "e4m3 emulated", "e5m2 emulated"),
        ("bf16; 3: fp32", "bf16 emulated", "bf16 emulated"),
    ],
)
def test_prepared_model_has_no_findings_and_the_formats_of_its_plan(policy, forward, backward):
    model, (x, y) = mlp(), data()
    optimizer = adamw(model)
    run = nc.prepare(model, optimizer, policy=policy)

    def step():
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)

    audit = nc.audit(model, optimizer, step)
    assert audit.findings == ()
    row = audit.row("0")
    assert (row.forward, row.backward) == ((forward,), (backward,))
    master = policy.partition("master=")[2]
    assert row.master == ((master,) if master else ())
    sizes = run.stats().bytes
    assert audit.bytes["weights"] == sizes["params"]
    assert audit.bytes["masters"] == sizes["master"]


def test_released_model_is_audited_as_a_plain_one():
    model = mlp()
    optimizer = adamw(model)
    nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split").release()
    audit = audited(model, optimizer=optimizer)
    assert audit.row("0").forward == ("fp32",)
    assert audit.findings == ()


def test_convolutions_are_named_in_both_passes():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    x = torch.randn(4, 3, 8, 8)
    model(x)
    audit = audited(
        model, lambda: F.cross_entropy(model(x), torch.arange(4)), autocast=torch.bfloat16
    )
    row = audit.row("0")
    assert (row.kind, row.forward, row.backward) == ("convolution", ("bf16",), ("bf16",))
    assert audit.findings == ()


def test_attention_module_has_its_products():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    audit = audited(
        model, lambda: model(x, x, x)[0].float().square().mean(), autocast=torch.bfloat16
    )
    assert audit.row("").forward == audit.row("").backward == ("bf16",)
    assert audit.findings == ()


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model = Tied()
    ids = torch.arange(20)
    audit = audited(model, lambda: F.cross_entropy(model(ids), ids))
    assert audit.bytes["weights"] == 20 * 16 * 4
    assert audit.row("head").weight == audit.row("embed").weight == ("fp32",)
    assert audit.findings == ()


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_lora_adapters_train_in_fp32_and_peft_initialises_them_in_the_dtype_of_the_base(base):
    peft = pytest.importorskip("peft")
    frozen_mlp = mlp().to(torch.bfloat16 if base == "bf16" else torch.float32)
    model = peft.get_peft_model(frozen_mlp, peft.LoraConfig(r=4, target_modules=["0", "3"]))
    x, y = data()
    audit = audited(model, lambda: F.cross_entropy(model(x), y), autocast=torch.bfloat16)
    assert kinds(audit) == ({"weights on a narrow grid"} if base == "bf16" else set())
    frozen = audit.row("base_model.model.0.base_layer")
    assert (frozen.weight, frozen.gradient, frozen.moments) == ((base,), (), ())
    assert audit.row("base_model.model.0.lora_A.default").gradient == ("fp32",)


def test_optimizer_of_replaced_weights_is_stale():
    model = mlp()
    optimizer = adamw(model)
    for layer in (model[0], model[3]):  # what a wrapper does that converts weights
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    audit = audited(model, optimizer=optimizer)
    assert finding(audit, "not in the optimizer").where == "0.weight, 3.weight"
    assert "2 parameters" in finding(audit, "not in the model").what


def test_master_weights_of_another_optimizer_are_recognised_by_their_values():
    class MasterAdamW(torch.optim.AdamW):
        """Holds fp32 copies, as apex and Megatron do."""

        def __init__(self, working):
            self.working = list(working)
            self.copies = [nn.Parameter(p.detach().float()) for p in self.working]
            super().__init__(self.copies, lr=1e-3)

        def step(self, closure=None):
            for own, copy in zip(self.working, self.copies, strict=True):
                copy.grad = own.grad.float()
            super().step(closure)
            with torch.no_grad():
                for own, copy in zip(self.working, self.copies, strict=True):
                    own.copy_(copy)

    model = mlp().to(torch.bfloat16)
    x, y = data()
    optimizer = MasterAdamW(model.parameters())
    audit = audited(model, lambda: F.cross_entropy(model(x.bfloat16()), y), optimizer=optimizer)
    assert audit.findings == ()
    assert (audit.row("0").master, audit.row("0").moments) == (("fp32",), ("fp32",))


def test_large_upcast_is_reported_with_its_module_and_size():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(2, 4096, bias=False)

        def forward(self, x):
            return self.proj(x).float()

    model = Head()
    x = torch.randn(4096, 2)
    audit = audited(model, lambda: model(x).mean(), autocast=torch.bfloat16)
    assert audit.upcast_bytes == {"": 4096 * 4096 * 4}
    assert "64.0 MiB" in finding(audit, "large upcast").what


@pytest.mark.parametrize("scaled", [False, True])
def test_tiny_fp16_gradients_need_a_loss_scale(scaled):
    model, (x, y) = mlp(), data()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) * 1e-3
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert kinds(nc.audit(model, optimizer, step)) == (set() if scaled else {"no loss scale"})


def test_step_that_a_grad_scaler_skips_is_reported_as_skipped():
    model, (x, y) = mlp(), data()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert kinds(nc.audit(model, optimizer, step)) == {"skipped step"}


def test_bf16_gradients_of_two_backward_passes_are_reported_as_narrow_accumulation():
    model, (x, y) = mlp().to(torch.bfloat16), data()
    optimizer = adamw(model)

    def step():
        for half in (slice(0, 4), slice(4, 8)):
            F.cross_entropy(model(x[half].bfloat16()), y[half]).backward()
        optimizer.step()

    assert (
        "2 backward passes" in finding(nc.audit(model, optimizer, step), "narrow accumulation").what
    )


def test_zero_learning_rate_of_a_warm_up_is_no_lost_update():
    model = mlp()
    assert kinds(audited(model, optimizer=adamw(model, lr=0.0))) == {"zero learning rate"}


def test_products_of_a_checkpointed_block_belong_to_it_in_both_passes():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = mlp()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    audit = audited(Checkpointed(), autocast=torch.bfloat16)
    for module in ("block.0", "block.3"):
        assert audit.row(module).forward == audit.row(module).backward == ("bf16",)
    assert {row.module for row in audit.rows} == {"block.0", "block.1", "block.3"}


def test_compiled_model_is_named_and_its_products_are_seen_or_reported():
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = adamw(model)
    step = plain_step(compiled, optimizer)
    step()  # compiles
    audit = nc.audit(compiled, optimizer, step)
    assert audit.compiled == ("",)
    assert "eager mode" in str(audit)
    seen = all(audit.row(f"_orig_mod.{name}").forward == ("fp32",) for name in "03")
    assert seen or "products not seen" in kinds(audit)


def test_two_optimizers_of_a_gan_are_audited_together_or_one_at_a_time():
    generator, critic = mlp(), nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = [adamw(generator), adamw(critic)]
    x, _ = data()

    def step():
        fake = generator(x)
        for inputs, sign, optimizer in (
            (fake.detach(), 1, optimizers[1]),
            (fake, -1, optimizers[0]),
        ):
            optimizer.zero_grad()
            F.softplus(sign * critic(inputs)).mean().backward()
            optimizer.step()

    assert nc.audit(both, optimizers, step).findings == ()
    alone = nc.audit(generator, optimizers[0], step)
    assert alone.findings == ()
    assert alone.bytes["gradients"] == alone.bytes["weights"]
    assert alone.rows[-1].module == "(outside the model)"


def test_llama_under_fp16_autocast_with_a_grad_scaler_has_no_findings():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    ids = torch.randint(0, 64, (2, 16))

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    audit = nc.audit(model, optimizer, step)
    assert audit.findings == ()
    attention = audit.row("model.layers.2.self_attn")
    assert attention.forward == attention.backward == ("fp16",)
    assert "model.layers.{0–2}.self_attn.q_proj ×3" in str(audit)


@pytest.mark.parametrize("prepared", [False, True])
def test_recurrent_layers_are_seen(prepared):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 10)

        def forward(self, x):
            return self.head(self.cell(self.lstm(x[:, None])[0][:, -1]))

    torch.manual_seed(0)
    model, (x, y) = Recurrent(), data()
    optimizer = adamw(model)
    run = nc.prepare(model, optimizer, policy="bf16") if prepared else None

    def prepared_step():
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)

    plain = plain_step(model, optimizer, autocast=torch.bfloat16)
    audit = nc.audit(model, optimizer, prepared_step if prepared else plain)
    name = "bf16 emulated" if prepared else "bf16"
    assert [audit.row(each).forward for each in ("lstm", "cell", "head")] == [(name,)] * 3
    assert audit.findings == ()


def test_closure_of_an_optimizer_is_seen_and_products_of_its_update_are_not():
    model = nn.Linear(16, 16, bias=False)
    x, _ = data()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        lbfgs.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    assert nc.audit(model, lbfgs, lambda: lbfgs.step(closure)).row("").forward == ("fp32",)
    muon = torch.optim.Muon(model.parameters(), lr=1e-2)  # multiplies bf16 matrices in its step
    audit = audited(model, lambda: model(x).square().mean(), optimizer=muon)
    assert audit.flop_shares == {"fp32": 1.0}


def test_sparse_and_nested_tensors_are_audited():
    model = nn.EmbeddingBag(20, 16, sparse=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = audited(model, lambda: model(torch.arange(8)[None]).sum(), optimizer=sgd)
    assert audit.findings == ()
    assert audit.row("").gradient == ("fp32",)
    linear = nn.Linear(16, 4)
    rows = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    audit = audited(linear, lambda: linear(rows).values().square().mean())
    assert audit.row("").forward == audit.row("").backward == ("fp32",)


def test_alike_rows_are_folded_and_text_is_escaped_for_notebooks():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    audit = audited(model)
    assert "{0–4} ×5" in str(audit)
    assert len(audit.rows) == 5
    assert "findings  none" in str(audit)
    html = audit._repr_html_()
    assert html.count("<tr") == 2
    again = json.loads(json.dumps(audit.to_json()))
    assert again["rows"][0]["forward"] == ["fp32"]
    bad = audited(nn.ModuleDict({"a": nn.Linear(16, 10)})["a"].bfloat16().float())
    assert "<li><b>all values" in bad._repr_html_()


def test_misuse_says_what_to_write():
    model = mlp()
    optimizer = adamw(model)
    with pytest.raises(ConfigError, match=r"step.*must be a function"):
        nc.audit(model, optimizer, None)
    with pytest.raises(ConfigError, match=r"model.*must be an nn.Module"):
        nc.audit(optimizer, model, print)
    with pytest.raises(ConfigError, match=r"optimizer.*must be a torch optimizer"):
        nc.audit(model, 3, print)
    with pytest.raises(ConfigError, match="at least one optimizer"):
        nc.audit(model, [], print)
    with pytest.raises(ConfigError, match="no backward pass"):
        nc.audit(model, optimizer, lambda: model(data()[0]))
    with pytest.raises(ConfigError, match="no optimizer step"):
        nc.audit(model, optimizer, lambda: model(data()[0]).sum().backward())
    with pytest.raises(ConfigError, match=r"expected.*'int7'"):
        nc.audit(model, optimizer, print, expected="int7")
    assert not torch.nn.modules.module._global_forward_hooks
