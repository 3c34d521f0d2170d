"""Two networks against one another: a GAN with a module in common, and a gradient penalty."""

import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

STEPS = 8
GENERATOR = torch.Generator().manual_seed(7)
REAL = torch.randn(STEPS, 16, 8, generator=GENERATOR) * 0.5 + 1
NOISE = torch.randn(STEPS, 16, 4, generator=GENERATOR)
MIX = torch.rand(STEPS, 16, 1, generator=GENERATOR)
ONES, ZEROS = torch.ones(16, 1), torch.zeros(16, 1)


class Generator(nn.Module):
    """Makes samples; its last layer is the discriminator's first, the other way round."""

    def __init__(self, features):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.features = features

    def forward(self, z):
        return F.linear(self.body(z), self.features.weight.t())


class Discriminator(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.features = features
        self.head = nn.Sequential(nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x):
        return self.head(self.features(x))


def gan_parts():
    torch.manual_seed(0)
    features = nn.Linear(8, 16)  # in both, trained by the discriminator's optimizer
    g, d = Generator(features), Discriminator(features)
    own = list(g.body.parameters())
    return g, d, torch.optim.Adam(own, lr=1e-2), torch.optim.Adam(d.parameters(), lr=1e-2)


def plain_gan(trained):
    g, d, opt_g, opt_d = gan_parts()
    losses = []
    for real, z in zip(REAL, NOISE, strict=True):
        opt_d.zero_grad()
        fake = g(z)
        loss_d = F.binary_cross_entropy_with_logits(d(real), ONES)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(d(fake.detach()), ZEROS)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(d(g(z)), ONES)
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
        with run_d.compute():
            fake = g(z)
            loss_d = F.binary_cross_entropy_with_logits(d(real), ONES)
            loss_d = loss_d + F.binary_cross_entropy_with_logits(d(fake.detach()), ZEROS)
        run_d.step(loss_d)
        run_g.zero_grad()
        with run_g.compute():
            loss_g = F.binary_cross_entropy_with_logits(d(g(z)), ONES)
        run_g.step(loss_g)
        losses += [loss_d.item(), loss_g.item()]
    run_g.release()
    run_d.release()
    return trained(losses, [g, d], [opt_g, opt_d])


def test_a_gan_in_fp32_is_the_plain_one(trained, same):
    same(gan(trained, policy="fp32"), plain_gan(trained))


def test_a_gan_trains_in_a_narrow_policy(trained, near, narrow):
    near(gan(trained, **narrow), plain_gan(trained), products=4, **narrow)


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
        with run_d.compute():
            fake = g(z).detach()
            loss_d = d(fake).mean() - d(real).mean() + penalty(d, real, fake, mix)
        run_d.step(loss_d)
        run_g.zero_grad()
        with run_g.compute():
            loss_g = -d(g(z)).mean()
        run_g.step(loss_g)
        losses += [loss_d.item(), loss_g.item()]
    run_g.release()
    run_d.release()
    return trained(losses, [g, d], [opt_g, opt_d])


def test_a_gradient_penalty_in_fp32_is_the_plain_one(trained, same):
    same(wgan(trained, policy="fp32"), plain_wgan(trained))


def test_a_gradient_penalty_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    # The penalty is ten times the square of what passed through six products.
    mine, theirs = wgan(trained, **narrow_or_params), plain_wgan(trained)
    near(mine, theirs, products=120, **narrow_or_params)
