"""Two networks against one another: a GAN with a module in common, and a gradient penalty."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError

STEPS = 8
GENERATOR = torch.Generator().manual_seed(7)
REAL = torch.randn(STEPS, 16, 8, generator=GENERATOR) * 0.5 + 1
NOISE = torch.randn(STEPS, 16, 4, generator=GENERATOR)
MIX = torch.rand(STEPS, 16, 1, generator=GENERATOR)
ONES, ZEROS = torch.ones(16, 1), torch.zeros(16, 1)


def gan_parts():
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    opt_g = torch.optim.Adam(g.parameters(), lr=1e-2)
    return g, d, opt_g, torch.optim.Adam(d.parameters(), lr=1e-2)


class Generator(nn.Module):
    """Makes samples with the first layer of the discriminator, the other way round."""

    def __init__(self, features):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.features = features

    def forward(self, z):
        return F.linear(self.body(z), self.features.weight.t())


def parts_with_a_module_in_common():
    torch.manual_seed(0)
    features = nn.Linear(8, 16)
    g, d = Generator(features), nn.Sequential(features, nn.LeakyReLU(0.2), nn.Linear(16, 1))
    # Both use the features; the discriminator's optimizer trains them.
    opt_g = torch.optim.Adam(g.body.parameters(), lr=1e-2)
    return g, d, opt_g, torch.optim.Adam(d.parameters(), lr=1e-2)


def loss_of_discriminator(g, d, real, z):
    loss = F.binary_cross_entropy_with_logits(d(real), ONES)
    return loss + F.binary_cross_entropy_with_logits(d(g(z).detach()), ZEROS)


def loss_of_generator(g, d, z):
    return F.binary_cross_entropy_with_logits(d(g(z)), ONES)


def plain_gan(trained, parts):
    g, d, opt_g, opt_d = parts()
    losses = []
    for real, z in zip(REAL, NOISE, strict=True):
        opt_d.zero_grad()
        loss_d = loss_of_discriminator(g, d, real, z)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = loss_of_generator(g, d, z)
        loss_g.backward()
        opt_g.step()
        losses += [loss_d.item(), loss_g.item()]
    return trained(losses, [g, d], [opt_g, opt_d])


def gan(trained, **settings):
    g, d, opt_g, opt_d = gan_parts()
    run_d = nc.prepare(d, opt_d, **settings)
    run_g = nc.prepare(g, opt_g, **settings)
    losses = []
    for real, z in zip(REAL, NOISE, strict=True):
        run_d.zero_grad()
        with run_d.autocast():
            loss_d = loss_of_discriminator(g, d, real, z)
        run_d.step(loss_d)
        with run_g.autocast():
            loss_g = loss_of_generator(g, d, z)
        run_g.step(loss_g)
        losses += [loss_d.item(), loss_g.item()]
    run_g.release()
    run_d.release()
    return trained(losses, [g, d], [opt_g, opt_d])


def gan_with_a_module_in_common(trained, **settings):
    """One run with two optimizers; each loss steps the weights that have gradients then."""
    g, d, opt_g, opt_d = parts_with_a_module_in_common()
    run = nc.prepare(nn.ModuleList([g, d]), [opt_g, opt_d], **settings)
    losses = []
    for real, z in zip(REAL, NOISE, strict=True):
        run.zero_grad()
        with run.autocast():
            loss_d = loss_of_discriminator(g, d, real, z)
        run.step(loss_d)
        run.zero_grad()
        with run.autocast():
            loss_g = loss_of_generator(g, d, z)
        run.backward(loss_g)
        opt_d.zero_grad()  # which leaves the generator's
        run.step()
        losses += [loss_d.item(), loss_g.item()]
    run.release()
    return trained(losses, [g, d], [opt_g, opt_d])


def test_a_gan_in_fp32_is_the_plain_one(trained, same):
    same(gan(trained, policy="fp32"), plain_gan(trained, gan_parts))


def test_a_gan_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    mine, theirs = gan(trained, **narrow_or_params), plain_gan(trained, gan_parts)
    near(mine, theirs, products=4, **narrow_or_params)


def test_a_gan_with_a_module_in_common_in_fp32_is_the_plain_one(trained, same):
    theirs = plain_gan(trained, parts_with_a_module_in_common)
    same(gan_with_a_module_in_common(trained, policy="fp32"), theirs)


def test_a_gan_with_a_module_in_common_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    mine = gan_with_a_module_in_common(trained, **narrow_or_params)
    theirs = plain_gan(trained, parts_with_a_module_in_common)
    near(mine, theirs, products=4, **narrow_or_params)


def test_a_module_in_common_is_prepared_once_and_the_second_time_refused():
    g, d, opt_g, opt_d = parts_with_a_module_in_common()
    run = nc.prepare(d, opt_d, policy="bf16, params=bf16, master=split")
    before = {name: value.clone() for name, value in g.state_dict().items()}
    with pytest.raises(ConfigError, match="share a module"):
        nc.prepare(g, opt_g, policy="bf16, params=bf16, master=split")
    after = g.state_dict()
    assert all(v.dtype == after[k].dtype and torch.equal(v, after[k]) for k, v in before.items())
    run.release()


def test_gradients_that_the_other_network_left_are_refused_rather_than_added(trained):
    g, d, opt_g, opt_d = gan_parts()
    run_d, run_g = nc.prepare(d, opt_d, policy="bf16"), nc.prepare(g, opt_g, policy="bf16")
    with run_g.autocast():
        loss = loss_of_generator(g, d, NOISE[0])
    run_g.step(loss)
    with run_d.autocast():
        loss = loss_of_discriminator(g, d, REAL[0], NOISE[0])
    with pytest.raises(ConfigError, match="zero_grad"):
        run_d.step(loss)


def critic_parts():
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    d = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    opt_g = torch.optim.RMSprop(g.parameters(), lr=1e-3)
    return g, d, opt_g, torch.optim.RMSprop(d.parameters(), lr=1e-3)


def penalty(d, real, fake, mix):
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(d(between).float().sum(), between, create_graph=True)
    return 10 * (gradient.norm(dim=1) - 1).square().mean()


def plain_wgan(trained):
    g, d, opt_g, opt_d = critic_parts()
    losses = []
    for real, z, mix in zip(REAL, NOISE, MIX, strict=True):
        opt_d.zero_grad()
        fake = g(z).detach()
        loss_d = d(fake).mean() - d(real).mean() + penalty(d, real, fake, mix)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = -d(g(z)).mean()
        loss_g.backward()
        opt_g.step()
        losses += [loss_d.item(), loss_g.item()]
    return trained(losses, [g, d], [opt_g, opt_d])


def wgan(trained, **settings):
    g, d, opt_g, opt_d = critic_parts()
    run_g = nc.prepare(g, opt_g, **settings)
    run_d = nc.prepare(d, opt_d, **settings)
    losses = []
    for real, z, mix in zip(REAL, NOISE, MIX, strict=True):
        run_d.zero_grad()
        with run_d.autocast():
            fake = g(z).detach()
            loss_d = d(fake).mean() - d(real).mean() + penalty(d, real, fake, mix)
        run_d.step(loss_d)
        run_g.zero_grad()
        with run_g.autocast():
            loss_g = -d(g(z)).mean()
        run_g.step(loss_g)
        losses += [loss_d.item(), loss_g.item()]
    run_g.release()
    run_d.release()
    return trained(losses, [g, d], [opt_g, opt_d])


def test_a_gradient_penalty_in_fp32_is_the_plain_one(trained, same):
    same(wgan(trained, policy="fp32"), plain_wgan(trained))


def test_a_gradient_penalty_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    # Four products to the penalty, which is ten times a square of what passed through them.
    mine, theirs = wgan(trained, **narrow_or_params), plain_wgan(trained)
    near(mine, theirs, products=4 * 10, **narrow_or_params)


def normalised_critic():
    torch.manual_seed(0)
    d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    for i in (0, 2):
        nn.utils.parametrizations.spectral_norm(d[i])
    return d, torch.optim.Adam(d.parameters(), lr=1e-2)


def plain_spectral(trained):
    d, optimizer = normalised_critic()
    losses = []
    for real, mix in zip(REAL, MIX, strict=True):
        loss = F.relu(1 - d(real)).mean() + F.relu(1 + d(mix * real)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [d], [optimizer])


def spectral(trained, **settings):
    d, optimizer = normalised_critic()
    run = nc.prepare(d, optimizer, **settings)
    losses = []
    for real, mix in zip(REAL, MIX, strict=True):
        with run.autocast():
            loss = F.relu(1 - d(real)).mean() + F.relu(1 + d(mix * real)).mean()
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return trained(losses, [d], [optimizer])


def test_spectral_normalisation_in_fp32_is_the_plain_one(trained, same):
    same(spectral(trained, policy="fp32"), plain_spectral(trained))


def test_spectral_normalisation_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    # A weight is divided by its norm, which two products find, before it is multiplied.
    mine, theirs = spectral(trained, **narrow_or_params), plain_spectral(trained)
    near(mine, theirs, products=8, **narrow_or_params)
