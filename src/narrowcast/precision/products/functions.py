"""The functions of torch that a region is about: products, and what is added up in fp32."""

from typing import Any

import torch
import torch.nn.functional as F

# The functions torch's autocast runs in 16 bits, as a function mode sees them: each is a product
# of its floating-point arguments.
PRODUCTS: frozenset[Any] = frozenset(
    {
        torch.mm, torch.bmm, torch.mv, torch.matmul, torch.addmm, torch.addmv, torch.addbmm,
        torch.baddbmm, torch.einsum, torch.tensordot, torch.inner, torch.dot, torch.bilinear,
        torch.chain_matmul, torch.linalg.multi_dot, torch.linalg.matmul, torch.linalg.vecdot,
        torch.vdot, torch.Tensor.vdot,
        torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.mv, torch.Tensor.matmul,
        torch.Tensor.addmm, torch.Tensor.addmv, torch.Tensor.addbmm, torch.Tensor.baddbmm,
        torch.Tensor.inner, torch.Tensor.dot, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__,
        F.bilinear, F.scaled_dot_product_attention,
        F.conv1d, F.conv2d, F.conv3d,
        F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
        torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.conv_tbc,
    }
)  # fmt: skip

# Functions in which torch multiplies where nobody sees it, which stay in fp32.
HIDING: frozenset[Any] = frozenset(
    {
        torch.cov, torch.corrcoef, torch.matrix_power, torch.linalg.matrix_power, torch.matrix_exp,
        torch.linalg.matrix_exp, torch.Tensor.cov, torch.Tensor.corrcoef, torch.Tensor.matrix_power,
        torch.Tensor.matrix_exp,
    }
)  # fmt: skip

IN_PLACE: dict[Any, Any] = {
    torch.Tensor.addmm_: torch.Tensor.addmm,
    torch.Tensor.addmv_: torch.Tensor.addmv,
    torch.Tensor.addbmm_: torch.Tensor.addbmm,
    torch.Tensor.baddbmm_: torch.Tensor.baddbmm,
}

# Where a 16-bit stream must be widened first: sums, exponentials, normalisations, losses.
REDUCTIONS: frozenset[Any] = frozenset(
    {
        torch.softmax, torch.log_softmax, torch.logsumexp, torch.sum, torch.mean, torch.prod,
        torch.cumsum, torch.cumprod, torch.var, torch.std, torch.norm, torch.exp, torch.log,
        torch.pow, torch.rsqrt, torch.linalg.vector_norm, torch.linalg.norm, torch.cdist,
        torch.dist, torch.log1p, torch.log2, torch.log10, torch.expm1, torch.reciprocal,
        torch.Tensor.log1p, torch.Tensor.log2, torch.Tensor.log10, torch.Tensor.expm1,
        torch.Tensor.reciprocal, torch.Tensor.dist, F.softplus, F.multi_margin_loss,
        F.multilabel_margin_loss, F.soft_margin_loss, F.pairwise_distance,
        torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.logsumexp, torch.Tensor.sum,
        torch.Tensor.mean, torch.Tensor.prod, torch.Tensor.cumsum, torch.Tensor.cumprod,
        torch.Tensor.var, torch.Tensor.std, torch.Tensor.norm, torch.Tensor.exp, torch.Tensor.log,
        torch.Tensor.pow, torch.Tensor.rsqrt,
        F.softmax, F.log_softmax, F.softmin, F.layer_norm, F.group_norm, F.rms_norm,
        F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
        F.kl_div, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
        F.gaussian_nll_loss, F.cosine_similarity, F.cosine_embedding_loss, F.normalize,
        F.margin_ranking_loss, F.hinge_embedding_loss, F.triplet_margin_loss, F.ctc_loss,
    }
)  # fmt: skip
