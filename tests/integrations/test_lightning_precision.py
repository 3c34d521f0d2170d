"""Every feature is written twice, with the plug-in and as a plain loop; both must agree exactly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import narrowcast as nc

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning")
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
    one, other = one.state_dict(), other.state_dict()
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
