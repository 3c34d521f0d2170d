"""Every feature is written twice, with the plug-in and as a plain loop; both must agree exactly."""

import copy
import csv
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import narrowcast as nc

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning")
from lightning.fabric import Fabric  # noqa: E402

from narrowcast.errors import ConfigError, UnsupportedError  # noqa: E402
from narrowcast.integrations.lightning import NarrowcastPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own
POLICIES = ["fp32", "fp16", "bf16, params=bf16, master=split", "fp8-delayed"]
BATCHES = 6


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * BATCHES, 16, generator=generator)
    x[8 * 3] = float("inf")  # one bad batch of BATCHES
    return TensorDataset(x, torch.randint(0, 4, (8 * BATCHES,), generator=generator))


@pytest.fixture
def loader(data):
    return DataLoader(data, batch_size=8)


@pytest.fixture
def clean(data):
    x, y = data.tensors
    return DataLoader(TensorDataset(x.nan_to_num(posinf=0.0), y), batch_size=8)


def make_module(base=None, **methods):
    class Module((base or pl).LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, index):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss.detach().nan_to_num())
            return loss

        def validation_step(self, batch, index):
            x, y = batch
            self.log("val_loss", F.cross_entropy(self.net(x), y))

        def predict_step(self, batch, index):
            return self.net(batch[0])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    for name, method in methods.items():
        setattr(Module, name, method)
    return Module()


def make_trainer(plugin, *, base=None, tmp_path=None, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1}
    return (base or pl).Trainer(
        plugins=[plugin], default_root_dir=tmp_path, **{**quiet, **settings}
    )


def plain_loop(policy, loader, *, accumulate=1, epochs=1, edit=None, decay=0.5, **settings):
    """Train the same module in a loop of ours; return its weights and learning rate."""
    module = make_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    run = nc.prepare(module, optimizer, policy=policy, scheduler=scheduler, **settings)
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader):
            with run.autocast():
                loss = F.cross_entropy(module.net(x), y)
            run.backward(loss / accumulate)
            if (i + 1) % accumulate == 0:
                if edit is not None:
                    run.unscale()
                    edit(module)
                run.step()
    run.release()
    return module, optimizer.param_groups[0]["lr"]


def assert_same_weights(one, other):
    one, other = (m.state_dict() if isinstance(m, nn.Module) else m for m in (one, other))
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype == torch.float32
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("policy", POLICIES)
def test_fit_equals_the_plain_loop_and_the_schedule_ignores_skipped_steps(policy, loader):
    plugin, module = NarrowcastPrecision(policy), make_module()
    trainer = make_trainer(plugin, gradient_clip_val=0.5)
    trainer.fit(module, loader)
    expected, lr = plain_loop(policy, loader, clip_norm=0.5)
    assert_same_weights(module, expected)
    assert trainer.optimizers[0].param_groups[0]["lr"] == lr == 1e-2 * 0.5 ** (BATCHES - 1)
    assert trainer.global_step == BATCHES
    assert (plugin.stats.applied, plugin.stats.skipped) == (BATCHES - 1, 1)
    assert plugin.outcome.applied
    assert type(module.net[0]) is nn.Linear


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_one_plugin_works_in_both_copies_of_lightning(package, loader):
    base = pytest.importorskip(package)
    module = make_module(base)
    make_trainer(NarrowcastPrecision("fp16"), base=base, gradient_clip_val=0.5).fit(module, loader)
    assert_same_weights(module, plain_loop("fp16", loader, clip_norm=0.5)[0])


@pytest.mark.parametrize("policy", ["fp16", POLICIES[2]])
def test_accumulation_equals_the_plain_loop(policy, loader):
    module = make_module()
    plugin = NarrowcastPrecision(policy, clip_norm=0.5)
    make_trainer(plugin, accumulate_grad_batches=2).fit(module, loader)
    expected, _ = plain_loop(policy, loader, accumulate=2, clip_norm=0.5)
    assert_same_weights(module, expected)
    assert plugin.stats.skipped == 1


def test_clipping_by_value_and_hooks_see_true_gradients(clean):
    seen = []

    def on_before_optimizer_step(self, optimizer):
        seen.append(max(p.grad.abs().max().item() for p in self.parameters()))

    def clip(module):
        nn.utils.clip_grad_value_(module.parameters(), 0.01)

    module = make_module(on_before_optimizer_step=on_before_optimizer_step)
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    make_trainer(NarrowcastPrecision("fp16"), **settings).fit(module, clean)
    assert_same_weights(module, plain_loop("fp16", clean, edit=clip)[0])
    assert len(seen) == BATCHES
    assert all(0 < each < 10 for each in seen)  # a loss scale of 65536 would show


def test_own_gradient_clipping_edits_true_gradients(clean):
    def configure_gradient_clipping(self, optimizer, **_):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    module = make_module(configure_gradient_clipping=configure_gradient_clipping)
    make_trainer(NarrowcastPrecision("fp16")).fit(module, clean)
    expected, _ = plain_loop(
        "fp16", clean, edit=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    )
    assert_same_weights(module, expected)


def test_training_step_may_return_none(clean):
    def training_step(self, batch, index):
        x, y = batch
        return None if index == 2 else F.cross_entropy(self.net(x), y)

    module, plugin = make_module(training_step=training_step), NarrowcastPrecision("fp16")
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2)
    make_trainer(plugin).fit(module, clean)
    batches = [batch for i, batch in enumerate(clean) if i != 2]
    assert_same_weights(module, plain_loop("fp16", batches, decay=1.0)[0])
    assert plugin.stats.steps == BATCHES - 1


def make_gan(toggled=False):
    class Gan(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(16, 16), nn.Linear(16, 1)

        def losses(self, x):
            yield lambda: -self.critic(self.generator(x)).mean()
            yield (
                lambda: (
                    self.critic(self.generator(x).detach()).square().mean()
                    + (self.critic(x) - 1).square().mean()
                )
            )

        def training_step(self, batch, index):
            for i, (optimizer, loss) in enumerate(
                zip(self.optimizers(), self.losses(batch[0]), strict=True)
            ):
                if toggled:
                    self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss())
                optimizer.step()
                if toggled:
                    self.untoggle_optimizer(optimizer)
                self.lr_schedulers()[i].step()

        def configure_optimizers(self):
            parts = self.generator, self.critic
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in parts]
            return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]

    return Gan()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("toggled", [False, True])
def test_optimizers_of_manual_optimization_update_only_their_own_weights(policy, toggled, loader):
    module, plugin = make_gan(toggled), NarrowcastPrecision(policy)
    trainer = make_trainer(plugin)
    trainer.fit(module, loader)
    expected = make_gan()
    optimizers, _ = expected.configure_optimizers()
    run = nc.prepare(expected, optimizers, policy=policy)
    for x, _ in loader:
        for optimizer, loss in zip(optimizers, expected.losses(x), strict=True):
            with run.autocast():
                value = loss()
            run.zero_grad()
            run.backward(value)
            other = expected.critic if optimizer is optimizers[0] else expected.generator
            other.zero_grad()
            if run.step().applied:
                optimizer.param_groups[0]["lr"] *= 0.5
    assert plugin.stats.skipped == run.stats().skipped >= 2
    run.release()
    assert_same_weights(module, expected)
    assert trainer.global_step == 2 * BATCHES
    for one, other in zip(trainer.optimizers, optimizers, strict=True):
        assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("saved", ["inside fit", "after fit"])
def test_resuming_from_a_checkpoint_is_bit_exact(policy, saved, loader, tmp_path):
    path, settings = tmp_path / "half.ckpt", {"ema_decay": 0.9} if saved == "inside fit" else {}
    whole, plugin = make_module(), NarrowcastPrecision(policy, **settings)
    make_trainer(plugin, max_epochs=2).fit(whole, loader)
    first = make_trainer(NarrowcastPrecision(policy, **settings), max_epochs=1)
    module = make_module()
    if saved == "inside fit":
        module.on_train_epoch_end = lambda: first.save_checkpoint(path)
    first.fit(module, loader)
    if saved == "after fit":
        first.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert {t.dtype for t in checkpoint["state_dict"].values()} == {torch.float32}
    assert_same_weights(module, checkpoint["state_dict"])
    resumed, again = make_module(), NarrowcastPrecision(policy, **settings)
    trainer = make_trainer(again, max_epochs=2)
    trainer.fit(resumed, loader, ckpt_path=path)
    assert_same_weights(resumed, whole)
    assert again.stats == plugin.stats
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 * 0.5 ** (2 * BATCHES - 2)
    if settings:
        assert_same_weights(plugin.ema_state_dict(), again.ema_state_dict())


def test_a_checkpoint_of_plain_lightning_can_be_continued(clean, tmp_path):
    path, module = tmp_path / "plain.ckpt", make_module()
    trainer = make_trainer(pl.plugins.precision.Precision())
    trainer.fit(module, clean)
    trainer.save_checkpoint(path)
    plugin, resumed = NarrowcastPrecision("fp32"), make_module()
    make_trainer(plugin, max_epochs=2).fit(resumed, clean, ckpt_path=path)
    assert_same_weights(resumed, plain_loop("fp32", clean, epochs=2)[0])
    assert plugin.stats.steps == BATCHES


def test_a_checkpoint_written_by_model_checkpoint_loads_into_a_plain_module(clean, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_weights_only=True, filename="weights")
    module, plugin = make_module(), NarrowcastPrecision(POLICIES[2])
    make_trainer(plugin, callbacks=[saver], enable_checkpointing=True).fit(module, clean)
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
    assert_same_weights(saved, module)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_plugin_is_copied_as_its_settings(copied, clean):
    plugin = NarrowcastPrecision("fp16", schedule={3: "bf16"}, clip_norm=0.5)
    module, other = make_module(), make_module()
    make_trainer(plugin).fit(module, clean)
    twin = copied(plugin)
    assert twin.settings == plugin.settings
    make_trainer(twin).fit(other, clean)
    assert_same_weights(module, other)


def test_one_plugin_serves_fit_validate_predict_and_another_fit(clean):
    plugin, module = NarrowcastPrecision(POLICIES[2]), make_module()
    trainer = make_trainer(plugin)
    trainer.validate(module, clean, verbose=False)
    for _ in range(2):
        trainer = make_trainer(plugin)
        trainer.fit(module, clean, clean)
        assert all(type(m) is not nn.Linear or not hasattr(m, "nc_plain_class") for m in module.net)
        assert "state_dict" not in vars(module)
        with torch.no_grad():
            expected = torch.cat([module.net(x) for x, _ in clean])
        assert torch.equal(torch.cat(trainer.predict(module, clean)), expected)
    assert plugin.stats.steps == BATCHES


def test_model_is_released_when_fit_fails(clean):
    def training_step(self, batch, index):
        raise KeyError("broken")

    module = make_module(training_step=training_step)
    with pytest.raises(KeyError, match="broken"):
        make_trainer(NarrowcastPrecision(POLICIES[2])).fit(module, clean)
    assert_same_weights(module.net, make_net())
    assert type(module.net[0]) is nn.Linear


def test_plateau_scheduler_follows_its_metric(clean):
    module = make_module()

    def configure_optimizers():
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }

    module.configure_optimizers = configure_optimizers
    trainer = make_trainer(NarrowcastPrecision("fp16"), max_epochs=3)
    trainer.fit(module, clean, clean)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)


def test_weight_averaging_callbacks_average_what_was_trained(clean):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    averaged = []
    for plugin in (
        pl.plugins.precision.Precision(),
        NarrowcastPrecision("fp32"),
        NarrowcastPrecision(POLICIES[2]),
    ):
        averaged.append(make_module())
        callbacks = [EMAWeightAveraging(decay=0.5)]
        make_trainer(plugin, max_epochs=2, callbacks=callbacks).fit(averaged[-1], clean, clean)
    stock, ours, narrow = averaged
    assert_same_weights(ours, stock)
    for one, other in zip(narrow.parameters(), stock.parameters(), strict=True):
        assert (one - other).abs().mean() < 2**-9  # of one bf16 rounding of weights up to 1/4


def test_stochastic_weight_averaging_and_early_stopping_run(clean):
    from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging

    callbacks = [StochasticWeightAveraging(1e-3, 1), EarlyStopping("val_loss", patience=5)]
    plugin, module = NarrowcastPrecision("fp16"), make_module()
    make_trainer(plugin, max_epochs=3, callbacks=callbacks).fit(module, clean, clean)
    assert plugin.stats.applied == 3 * BATCHES
    assert type(module.net[0]) is nn.Linear


def test_skips_and_loss_scale_are_logged(loader, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    trainer = make_trainer(NarrowcastPrecision("fp16"), logger=logger, log_every_n_steps=2)
    trainer.fit(make_module(), loader)
    with Path(logger.experiment.metrics_file_path).open() as file:
        rows = [row for row in csv.DictReader(file) if row["narrowcast/loss_scale"]]
    assert [row["step"] for row in rows] == ["1", "3", "5"]
    assert [float(row["narrowcast/skipped_steps"]) for row in rows] == [0, 1, 1]
    assert float(rows[-1]["narrowcast/loss_scale"]) < float(rows[0]["narrowcast/loss_scale"])
    assert float(rows[0]["grad_norm"]) > 0


def test_lbfgs_and_own_backward_raise(clean):
    module = make_module()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(UnsupportedError, match="LBFGS"):
        make_trainer(NarrowcastPrecision("bf16")).fit(module, clean)
    module = make_module(backward=lambda self, loss: loss.backward())
    with pytest.raises(UnsupportedError, match="manual_backward"):
        make_trainer(NarrowcastPrecision("bf16")).fit(module, clean)


def test_pruning_callback_raises(clean):
    pruning = pl.callbacks.ModelPruning("l1_unstructured", amount=0.3)
    with pytest.raises(UnsupportedError, match=r"ModelPruning.*torch\.nn\.utils\.prune"):
        make_trainer(NarrowcastPrecision("bf16"), callbacks=[pruning]).fit(make_module(), clean)


def test_subclass_of_plugin_and_precision_serves_lightning_cli(clean):
    class Narrowcast(NarrowcastPrecision, pl.plugins.precision.Precision):
        pass

    plugin, module = Narrowcast("fp16", clip_norm=0.5), make_module()
    assert isinstance(copy.deepcopy(plugin), Narrowcast)
    make_trainer(plugin).fit(module, clean)
    assert_same_weights(module, plain_loop("fp16", clean, clip_norm=0.5)[0])


def test_ema_of_optimizers_that_step_alone_raises(clean):
    with pytest.raises(UnsupportedError, match="ema_decay"):
        make_trainer(NarrowcastPrecision("bf16", ema_decay=0.9)).fit(make_gan(), clean)


def test_combinations_that_cannot_work_raise():
    with pytest.raises(ValueError, match=r"NarrowcastPrecision.*Choose one"):
        make_trainer(NarrowcastPrecision("bf16"), precision="bf16-mixed")
    with pytest.raises(TypeError, match="NarrowcastPrecision"):
        pl.strategies.FSDPStrategy(precision_plugin=NarrowcastPrecision("bf16"))
    with pytest.raises(ConfigError, match="did you mean clip_norm"):
        NarrowcastPrecision("bf16", clip_nrm=1.0)


def fabric_loop(policy, loader, *, max_norm=None, clip_val=None, epochs=1, path=None, resume=None):
    plugin = NarrowcastPrecision(policy)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net = make_net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    plugin.hold_scheduler(scheduler)
    loader = fabric.setup_dataloaders(loader)
    if resume is not None:
        fabric.load(resume, {"model": model, "precision": plugin, "scheduler": scheduler})
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            if max_norm or clip_val:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm, clip_val=clip_val)
            optimizer.step()
            scheduler.step()
    if path is not None:
        fabric.save(path, {"model": model, "precision": plugin, "scheduler": scheduler})
    plugin.release()
    return net, plugin


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.5}, {"clip_val": 0.01}])
def test_fabric_equals_the_plain_loop(policy, clip, loader):
    net, plugin = fabric_loop(policy, loader, **clip)
    expected = make_net()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = nc.prepare(expected, optimizer, policy=policy, scheduler=scheduler)
    for x, y in loader:
        with run.autocast():
            output = expected(x)
        run.backward(F.cross_entropy(output.float(), y))
        if clip:
            run.unscale()
        if "max_norm" in clip:
            nn.utils.clip_grad_norm_(expected.parameters(), clip["max_norm"])
        if "clip_val" in clip:
            nn.utils.clip_grad_value_(expected.parameters(), clip["clip_val"])
        run.step()
    assert plugin.stats.skipped == run.stats().skipped == 1
    run.release()
    assert_same_weights(net, expected)


@pytest.mark.parametrize("policy", ["fp16", POLICIES[2]])
def test_fabric_resumes_bit_exact(policy, loader, tmp_path):
    path = tmp_path / "state.ckpt"
    whole, _ = fabric_loop(policy, loader, epochs=2)
    fabric_loop(policy, loader, path=path)
    assert {t.dtype for t in torch.load(path)["model"].values()} == {torch.float32}
    assert_same_weights(fabric_loop(policy, loader, resume=path)[0], whole)


def test_fabric_without_an_optimizer_or_with_two_models_raises():
    plugin = NarrowcastPrecision("bf16")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = fabric.setup(make_net())
    with pytest.raises(ConfigError, match="one call"):
        fabric.backward(model(torch.ones(2, 16)).sum())
    fabric.setup(net := make_net(), torch.optim.SGD(net.parameters()))
    with pytest.raises(UnsupportedError, match="ModuleDict"):
        fabric.setup(net := make_net(), torch.optim.SGD(net.parameters()))
    assert not {"_fabric", "_fabric_optimizers", "on_after_setup"} & vars(net).keys()


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_two_processes_skip_a_step_together(policy, loader, clean):
    def training_step(self, batch, index):
        x, y = batch
        x = x * float("inf") if index == 3 and self.global_rank == 1 else x
        return F.cross_entropy(self.net(x), y)

    module = make_module(training_step=training_step)
    settings = {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": False}
    make_trainer(NarrowcastPrecision(policy), **settings).fit(module, clean)
    assert_same_weights(module, plain_loop(policy, loader)[0])  # its fourth batch has an inf


def test_narrow_weights_in_two_processes_raise(clean):
    trainer = make_trainer(NarrowcastPrecision(POLICIES[2]), strategy="ddp_fork", devices=2)
    with pytest.raises(Exception, match="Leave params= out of the policy"):
        trainer.fit(make_module(), clean)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "fp8-delayed"])
def test_finetuning_callbacks_may_add_weights(policy, clean):
    class Thaw(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer)

    thawed = []
    for plugin in (pl.plugins.precision.Precision(), NarrowcastPrecision(policy)):
        module = make_module()
        trained = (p for p in module.parameters() if p.requires_grad)
        module.configure_optimizers = lambda trained=trained: torch.optim.AdamW(trained, lr=1e-2)
        make_trainer(plugin, max_epochs=2, callbacks=[Thaw()]).fit(module, clean)
        thawed.append(module)
    assert plugin.stats.applied == 2 * BATCHES
    assert not torch.equal(thawed[1].net[0].weight, make_net()[0].weight)
    if policy == "fp32":
        assert_same_weights(*thawed)


def test_compiled_module_equals_the_plain_loop(clean):
    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    module = make_module(training_step=training_step)
    compiled = torch.compile(module, backend="eager")
    make_trainer(NarrowcastPrecision("bf16")).fit(compiled, clean)
    assert_same_weights(module, plain_loop("bf16", clean)[0])


def test_skipped_micro_batch_leaves_batch_norm_statistics_finite(loader):
    module, plugin = make_module(), NarrowcastPrecision("fp16")
    module.net.insert(1, nn.BatchNorm1d(32))
    make_trainer(plugin, accumulate_grad_batches=2).fit(module, loader)
    assert plugin.stats.skipped == 1
    assert module.net[1].running_mean.isfinite().all()
    assert module.net[1].num_batches_tracked == BATCHES - 2


def test_metrics_and_two_data_loaders(loader, clean):
    torchmetrics = pytest.importorskip("torchmetrics")

    def training_step(self, batch, index):
        (x, y), (other, labels) = batch["one"], batch["two"]
        output = self.net(x)
        self.log("accuracy", self.accuracy(output, y))
        return F.cross_entropy(output, y) + F.cross_entropy(self.net(other), labels)

    module, plugin = make_module(training_step=training_step), NarrowcastPrecision("fp16")
    module.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
    make_trainer(plugin).fit(module, {"one": clean, "two": loader})
    assert (plugin.stats.applied, plugin.stats.skipped) == (BATCHES - 1, 1)
