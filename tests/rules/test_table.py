"""Every rule of the table, proved on a sample call: each row fitted to every atom it fits."""

from dataclasses import replace

import pytest
import torch

from hap.graph import TensorMeta
from hap.ops import resolve
from hap.rules.notation import Call
from hap.rules.prove import prove_call, row_strategies, run_whole
from hap.rules.samples import sample_inputs
from hap.rules.table import BUILTIN, call_rows
from tests.rules.graphs import booleans, call, integers, meta

X, ROW, PIECE = meta(6, 4), meta(4), meta(3, 4)
GROUPED = meta(1, 12, 4, 4), meta(18, 2, 3, 3)  # a convolution of six groups
IMAGE, ATTENTION, VOLUME = meta(6, 4, 4, 4), meta(3, 4, 6, 2), meta(6, 2, 4, 4, 4)
PIVOTS = TensorMeta((6, 3), torch.int32)
COMPLEX = TensorMeta((6, 4, 5), torch.complex128)
NAMES = {
    (X,): """
        _to_copy.default abs.default acos.default alias.default all.default amax.default amin.default any.default
        argmax.default argmin.default asin.default atan.default ceil.default clone.default contiguous.default
        cos.default cosh.default detach.default elu.default erf.default erfc.default exp.default exp2.default
        expm1.default floor.default gelu.default hardsigmoid.default hardswish.default hardtanh.default
        isfinite.default isinf.default isnan.default leaky_relu.default lift_fresh_copy.default log.default
        log10.default log1p.default log2.default logical_not.default max.default mean.default min.default
        mish.default neg.default ones_like.default reciprocal.default relu.default round.default rsqrt.default
        sgn.default sigmoid.default sign.default silu.default sin.default sinh.default softplus.default sort.default
        sqrt.default squeeze.default std.correction std_mean.correction sum.default t.default tan.default tanh.default
        acosh.default asinh.default atanh.default celu.default digamma.default erfinv.default frac.default i0.default
        lgamma.default logit.default nan_to_num.default signbit.default sinc.default special_entr.default
        special_erfcx.default special_i0e.default special_i1.default special_i1e.default special_log_ndtr.default
        special_ndtri.default median.default nanmedian.default mode.default glu.default
        tril.default triu.default trunc.default trace.default prod.default zero.default diagonal.default
        diag_embed.default unbind.int var.correction var_mean.correction zeros_like.default slice.Tensor""",
    (X, 0): """
        add.Scalar add.Tensor sub.Scalar full_like.default all.dim any.dim cumprod.default cumsum.default
        cummax.default cummin.default logcumsumexp.default median.dim nanmedian.dim mode.default glu.default
        max.dim min.dim prod.dim_int squeeze.dim unsqueeze.default""",
    (X, 2.0): """
        add.Scalar clamp.default clamp_max.default clamp_min.default div.Scalar eq.Scalar fmod.Scalar full_like.default
        ge.Scalar gt.Scalar le.Scalar lt.Scalar mul.Scalar ne.Scalar pow.Tensor_Scalar remainder.Scalar rsub.Scalar
        sub.Scalar copysign.Scalar xlogy.Scalar_Other""",
    (X, ROW): """
        copysign.Tensor fmax.default fmin.default heaviside.default hypot.default logaddexp2.default
        xlogy.Tensor
        add.Tensor atan2.default clamp.Tensor div.Tensor eq.Tensor floor_divide.default fmod.Tensor ge.Tensor gt.Tensor
        clamp_max.Tensor clamp_min.Tensor
        le.Tensor logaddexp.default logical_and.default logical_or.default logical_xor.default lt.Tensor maximum.default
        minimum.default mul.Tensor mv.default ne.Tensor pow.Tensor_Tensor remainder.Tensor sub.Tensor""",
    (X, X): """
        add.Tensor gelu_backward.default hardsigmoid_backward.default hardswish_backward.default mish_backward.default
        mul.Tensor sigmoid_backward.default silu_backward.default tanh_backward.default logit_backward.default""",
    (X, (0,), False): "any.dims all.dims",
    (X, (0,)): "sum.dim_IntList mean.dim amax.default logsumexp.default flip.default var_mean.correction",
    (X, (1,), True): "sum.dim_IntList mean.dim amin.default logsumexp.default",
    (X, 1, False): "_softmax.default _log_softmax.default max.dim all.dim",
    (X, X, 0, torch.float64): "_softmax_backward_data.default _log_softmax_backward_data.default",
    (integers(6, 4),): "bitwise_not.default sum.default",
    (integers(6, 4), 2): "bitwise_and.Scalar bitwise_or.Scalar",
    (integers(6, 4), integers(6, 4)): """
        bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
        gcd.default""",
    (2.0, X): "xlogy.Scalar_Self",
    (X, 0.1, 2.0): "threshold.default",
    (X, 2, 0, True): "kthvalue.default",
    (X, X, ROW): "addcmul.default addcdiv.default lerp.Tensor",
    (X, X, 0.3): "lerp.Scalar",
    ((6, 4),): "zeros.default ones.default",
    ((6, 4), 0): "full.default",
    ((6, 4), 2.0): "full.default",
    (ROW, (6, 4)): "new_zeros.default new_ones.default",
    (X, (4, 6)): "view.default _unsafe_view.default reshape.default",
    (X, (2, 3, 2, 2)): "view.default",
    (X, (24,)): "view.default",
}
CALLS = [(f"aten.{name}", args) for args, names in NAMES.items() for name in names.split()] + [
    ("aten._safe_softmax.default", (X, 1)),
    ("aten.arange.default", (6,)),
    ("aten.arange.start", (0, 6)),
    ("aten.arange.start_step", (0, 6, 2)),
    ("aten.eye.default", (4,)),
    ("aten.eye.m", (4, 6)),
    ("aten.linspace.default", (0, 1, 6)),
    ("aten.logspace.default", (0, 1, 6)),
    ("aten.scalar_tensor.default", (0,)),
    ("aten.scalar_tensor.default", (1.0,)),
    ("aten.new_full.default", (ROW, (6, 4), 1.5)),
    ("aten.pow.Scalar", (2.0, X)),
    ("aten.where.self", (booleans(6, 1), X, ROW)),
    ("aten.masked_fill.Scalar", (X, booleans(6, 4), 0)),
    ("aten.masked_fill.Scalar", (X, booleans(6, 1), 1.0)),
    ("aten.masked_fill.Tensor", (X, booleans(6, 4), meta())),
    ("aten.elu_backward.default", (X, 1.0, 1.0, 1.0, False, X)),
    ("aten.hardtanh_backward.default", (X, X, -1.0, 1.0)),
    ("aten.leaky_relu_backward.default", (X, X, 0.1, False)),
    ("aten.softplus_backward.default", (X, X, 1.0, 20.0)),
    ("aten.threshold_backward.default", (X, X, 0.0)),
    ("aten.mm.default", (X, meta(4, 5))),
    ("aten.bmm.default", (meta(3, 6, 4), meta(3, 4, 5))),
    ("aten.dot.default", (ROW, ROW)),
    ("aten.div.Tensor", (X, integers(4))),
    ("aten.vdot.default", (ROW, ROW)),
    ("aten.linalg_inv_ex.default", (meta(6, 4, 4),)),
    ("aten.cat.default", ((X, meta(3, 4), meta(9, 4)), 0)),
    ("aten.cat.default", ((X, meta(6, 8)), -1)),
    ("aten.stack.default", ((X, X), 1)),
    ("aten.split_with_sizes.default", (X, (4, 2), 0)),
    ("aten.split_with_sizes.default", (meta(4, 12), (4, 4, 4), -1)),
    ("aten.split.Tensor", (X, 2, 0)),
    ("aten.slice.Tensor", (meta(12, 4), 0, 4, 8)),
    ("aten.slice.Tensor", (meta(12, 4), 0, 4, 2**63 - 1)),
    ("aten.slice.Tensor", (meta(12, 4), 0, -4, 2**63 - 1)),
    ("aten.slice.Tensor", (meta(12, 4), 0, 0, -4)),
    ("aten.slice.Tensor", (meta(12, 4), 0, 0, 12, 2)),
    ("aten.slice_backward.default", (PIECE, (12, 4), 0, 3, 6, 1)),
    ("aten.slice_backward.default", (X, (12, 4), 0, 0, 12, 2)),
    ("aten.select.int", (X, 0, 2)),
    ("aten.select.int", (X, 1, -1)),
    ("aten.select_backward.default", (ROW, (6, 4), 0, 2)),
    ("aten.unbind.int", (X, 1)),
    ("aten.slice_scatter.default", (X, meta(2, 4), 0, 1, 3)),
    ("aten.select_scatter.default", (X, ROW, 0, 2)),
    ("aten.fill.Tensor", (X, meta())),
    ("aten.fill.Scalar", (X, 0.0)),
    ("aten.fill.Scalar", (X, 1.5)),
    ("aten.constant_pad_nd.default", (X, (0, 1), 0.0)),
    ("aten.constant_pad_nd.default", (X, (0, 0, 1, 0), -100.0)),
    ("aten.permute.default", (meta(3, 6, 4), (2, 0, 1))),
    ("aten.transpose.int", (meta(3, 6, 4), 1, -1)),
    ("aten.unsqueeze.default", (X, -1)),
    ("aten.squeeze.default", (meta(1, 6, 1, 4),)),
    ("aten.squeeze.dim", (meta(6, 1, 4), 1)),
    ("aten.squeeze.dims", (meta(1, 6, 4), (0, 1))),
    ("aten.squeeze.dims", (meta(1, 6, 1, 4), (0, 2))),
    ("aten.expand.default", (meta(6, 1), (3, 6, 4))),
    ("aten.expand.default", (meta(6, 1), (3, -1, 4))),
    ("aten.repeat.default", (X, (2, 1, 3))),
    ("aten.roll.default", (X, (2,), (0,))),
    ("aten.roll.default", (X, (2,))),
    ("aten.topk.default", (X, 2)),
    ("aten.diagonal.default", (meta(3, 6, 4), 1, -1, 0)),
    ("aten.diagonal_backward.default", (meta(6, 3), (3, 6, 4), 0, 0, -1)),
    ("aten.diag_embed.default", (meta(3, 6, 4), -1, 0, 2)),
    ("aten.unfold.default", (meta(3, 6, 4), 1, 3, 1)),
    ("aten.unfold_backward.default", (meta(3, 4, 4, 3), (3, 6, 4), 1, 3, 1)),
    ("aten.unfold_backward.default", (meta(3, 6, 2, 2), (3, 6, 4), -1, 2, 2)),
    ("aten.im2col.default", (IMAGE, (2, 2), (1, 1), (0, 0), (1, 1))),
    ("aten.im2col.default", (meta(4, 4, 4), (2, 2), (1, 1), (0, 0), (1, 1))),
    ("aten.col2im.default", (meta(6, 16, 9), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1))),
    ("aten.col2im.default", (meta(16, 9), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1))),
    ("aten.sort.default", (X, 0)),
    ("aten.cumsum.default", (X, -1)),
    ("aten.gather.default", (X, 1, integers(6, 3))),
    ("aten.gather.default", (X, 0, integers(2, 4))),
    ("aten.scatter.src", (X, 1, integers(6, 1), meta(6, 1))),
    ("aten.scatter.value", (X, 1, integers(6, 1), -1.0)),
    ("aten.scatter_add.default", (X, 0, integers(5, 4), meta(5, 4))),
    ("aten.embedding.default", (meta(5, 4), integers(6, 3))),
    ("aten.embedding_dense_backward.default", (meta(6, 3, 4), integers(6, 3), 5, -1, False)),
    ("aten.index.Tensor", (meta(6, 5, 4), (None, integers(3, 2)))),
    ("aten.index.Tensor", (meta(6, 5, 4), (integers(3, 1), integers(2)))),
    ("aten.index.Tensor", (meta(6, 5, 4), (integers(3), None, integers(3)))),
    ("aten.index_put.default", (meta(6, 5, 4), (None, integers(3, 2)), meta(6, 3, 2, 4), True)),
    ("aten.index_put.default", (meta(6, 5, 4), (None, integers(3, 1), integers(2)), meta(6, 3, 2), True)),
    ("aten.index_put.default", (meta(6, 5, 4), (None, integers(3, 2)), meta(6, 3, 2, 4), False)),
    ("aten.index_put.default", (meta(6, 5, 4), (None, integers(3, 2)), meta(4), False)),
    ("aten.index_put.default", (meta(6, 5, 4), (None, integers(3)), meta(), False)),
    ("aten.index_put.default", (meta(6, 5, 4), (None, None, integers(3)), meta(6, 1, 3), False)),
    ("aten.index_put.default", (meta(6, 5, 4), (integers(3), integers(3)), meta(3, 1), False)),
    ("aten.index_select.default", (X, 0, integers(3))),
    ("aten.native_layer_norm.default", (meta(3, 6, 4), (4,), ROW, ROW, 1e-5)),
    ("aten.native_layer_norm.default", (meta(3, 6, 4), (6, 4), None, None, 1e-5)),
    (
        "aten.native_layer_norm_backward.default",
        (meta(3, 6, 4), meta(3, 6, 4), (4,), meta(3, 6, 1), meta(3, 6, 1), ROW, ROW, (True, True, True)),
    ),
    ("aten.convolution.default", (IMAGE, meta(2, 4, 3, 3), meta(2), (1, 1), (0, 0), (1, 1), False, (0, 0), 1)),
    ("aten.convolution.default", (IMAGE, meta(2, 4, 3, 3), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)),
    ("aten.convolution.default", (IMAGE, meta(4, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 4)),
    (
        "aten.convolution_backward.default",
        (meta(6, 2, 2, 2), IMAGE, meta(2, 4, 3, 3), (2,), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True,) * 3),
    ),
    ("hap.convolution.default", (*GROUPED, meta(18), (2, 1), (1, 2), (1, 2), False, (0, 0), 6)),
    (
        "hap.convolution.default",
        (GROUPED[0], meta(12, 3, 3, 3), meta(18), (2, 2), (1, 1), (1, 1), True, (1, 1), 6),
    ),
    ("hap.convolution.default", (meta(1, 6, 4), meta(6, 1, 2), meta(6), (1,), (0,), (1,), False, (0,), 6)),
    (
        "hap.convolution_backward.default",
        (meta(1, 18, 2, 2), *GROUPED, (18,), (1, 1), (0, 0), (1, 1), False, (0, 0), 6, (True,) * 3),
    ),
    (
        "hap.convolution_backward.default",
        (meta(1, 6, 5), meta(1, 12, 4), meta(12, 1, 2), None, (1,), (0,), (1,), True, (0,), 6, (True, True, False)),
    ),
    ("hap.batch_norm.default", (IMAGE, ROW, ROW, ROW, ROW)),
    ("hap.batch_norm.default", (IMAGE, ROW, ROW, None, None)),
    ("hap.batch_norm_squares.default", (IMAGE, ROW)),
    ("hap.batch_norm_sums.default", (IMAGE, IMAGE, ROW, ROW)),
    ("hap.batch_norm_backward.default", (IMAGE, IMAGE, ROW, ROW, ROW, ROW, ROW)),
    ("hap.batch_norm_backward.default", (X, X, ROW, ROW, None, ROW, ROW)),
    ("hap.dropout.default", (IMAGE, integers(), 0.3, 2, None)),
    ("hap.dropout.default", (meta(12), integers(), 0.5, 0, None)),
    ("aten.view_as_complex.default", (meta(6, 4, 2),)),
    ("aten.view_as_complex.default", (meta(2),)),
    ("aten.view_as_real.default", (COMPLEX,)),
    ("aten.conj_physical.default", (COMPLEX,)),
    ("aten.complex.default", (X, X)),
    ("aten.polar.default", (X, X)),
    ("aten.mul.Tensor", (COMPLEX, TensorMeta((5,), torch.complex128))),
    ("aten.abs.default", (COMPLEX,)),
    ("aten._fft_r2c.default", (meta(6, 4, 5), (1, 2), 0, True)),
    ("aten._fft_r2c.default", (meta(6, 4, 5), (2,), 2, False)),
    ("aten._fft_c2r.default", (COMPLEX, (0, 2), 1, 8)),
    ("aten._fft_c2c.default", (COMPLEX, (1,), 0, False)),
    ("hap.expert_mm.default", (meta(12, 6), meta(5, 6, 8), integers(12), None)),
    ("hap.expert_mm_weight.default", (meta(12, 6), meta(12, 8), integers(12), 5, None)),
    ("hap.hosts_sum.default", (IMAGE, 3, 2, 4)),
    ("hap.hosts_sum.default", (meta(), 0, 2, 1)),
    ("aten.native_group_norm.default", (IMAGE, meta(4), meta(4), 6, 4, 16, 2, 1e-5)),
    (
        "aten.native_group_norm_backward.default",
        (IMAGE, IMAGE, meta(6, 2), meta(6, 2), meta(4), 6, 4, 16, 2, (True, True, True)),
    ),
    ("aten.max_pool2d_with_indices.default", (IMAGE, (2, 2), (2, 2))),
    (
        "aten.max_pool2d_with_indices_backward.default",
        (meta(6, 4, 2, 2), IMAGE, (2, 2), (2, 2), (0, 0), (1, 1), False, integers(6, 4, 2, 2)),
    ),
    ("aten.avg_pool2d.default", (IMAGE, (2, 2), (2, 2))),
    ("aten.avg_pool2d_backward.default", (meta(6, 4, 2, 2), IMAGE, (2, 2), (2, 2), (0, 0), False, True, None)),
    ("aten._adaptive_avg_pool2d.default", (meta(6, 4, 5, 5), (2, 2))),
    ("aten._adaptive_avg_pool2d_backward.default", (meta(6, 4, 2, 2), meta(6, 4, 5, 5))),
    ("hap.attention.default", (ATTENTION, ATTENTION, ATTENTION, None, True, 0.5)),
    ("hap.attention.default", (ATTENTION, ATTENTION, ATTENTION, meta(3, 1, 6, 6), False, 0.5)),
    ("hap.attention.default", (ATTENTION, ATTENTION, ATTENTION, meta(6, 6), False, 0.5)),
    (
        "hap.attention_backward.default",
        (ATTENTION, ATTENTION, ATTENTION, ATTENTION, None, ATTENTION, meta(3, 4, 6), True, 0.5),
    ),
    (
        "hap.attention_backward.default",
        (ATTENTION, ATTENTION, ATTENTION, ATTENTION, meta(3, 1, 6, 6), ATTENTION, meta(3, 4, 6), False, 0.5),
    ),
]
LINALG = (
    "linalg_cholesky_ex",
    "linalg_qr",
    "_linalg_eigh",
    "_linalg_svd",
    "_linalg_det",
    "_linalg_slogdet",
    "linalg_matrix_exp",
)
SPOKEN = (meta(5, 6, 4), integers(6, 2), integers(6), integers(6), 3, True)
CALLS += [
    ("hap.ctc.default", SPOKEN),
    ("hap.ctc_backward.default", (meta(6), *SPOKEN)),
    ("aten.kthvalue.default", (X, 2)),
    ("aten.polygamma.default", (2, X)),
    ("aten.glu_backward.default", (PIECE, meta(3, 8), -1)),
    ("aten.glu_backward.default", (PIECE, X, 0)),
    ("aten.rrelu_with_noise_backward.default", (X, X, X, 0.1, 0.3, True, False)),
    ("aten.scatter_reduce.two", (X, 0, integers(6, 4), X, "amax")),
    ("aten.scatter_reduce.two", (X, 1, integers(6, 3), meta(6, 3), "mean")),
    ("aten.index_reduce.default", (X, 0, integers(3), PIECE, "amin")),
    ("aten.bucketize.Tensor", (X, meta(5))),
    ("aten.searchsorted.Tensor", (meta(5), X)),
    ("aten.searchsorted.Tensor", (meta(6, 5), X)),
    ("aten.masked_scatter.default", (X, booleans(6, 4), X)),
    ("aten.masked_scatter_backward.default", (X, booleans(6, 4), (6, 4))),
    ("aten.tril_indices.default", (4, 4)),
    ("aten.triu_indices.default", (4, 4)),
    # ---- windows ----
    ("aten.avg_pool3d.default", (VOLUME, (2, 2, 2))),
    (
        "aten.avg_pool3d_backward.default",
        (meta(6, 2, 2, 2, 2), VOLUME, (2, 2, 2), (2, 2, 2), (0, 0, 0), False, True, None),
    ),
    ("aten.max_pool3d_with_indices.default", (VOLUME, (2, 2, 2))),
    (
        "aten.max_pool3d_with_indices_backward.default",
        (
            meta(6, 2, 2, 2, 2),
            VOLUME,
            (2, 2, 2),
            (2, 2, 2),
            (0, 0, 0),
            (1, 1, 1),
            False,
            integers(6, 2, 2, 2, 2),
        ),
    ),
    ("aten._adaptive_avg_pool3d.default", (VOLUME, (3, 2, 1))),
    ("aten._adaptive_avg_pool3d_backward.default", (meta(6, 2, 3, 2, 1), VOLUME)),
    ("aten.adaptive_max_pool2d.default", (IMAGE, (3, 2))),
    ("aten.adaptive_max_pool2d_backward.default", (meta(6, 4, 3, 2), IMAGE, integers(6, 4, 3, 2))),
    ("aten.adaptive_max_pool3d.default", (VOLUME, (3, 2, 1))),
    ("aten.adaptive_max_pool3d_backward.default", (meta(6, 2, 3, 2, 1), VOLUME, integers(6, 2, 3, 2, 1))),
    ("aten.max_unpool2d.default", (meta(6, 4, 2, 2), integers(6, 4, 2, 2), (4, 4))),
    (
        "aten.max_unpool3d.default",
        (meta(6, 2, 2, 2, 2), integers(6, 2, 2, 2, 2), (4, 4, 4), (2, 2, 2), (0, 0, 0)),
    ),
    ("aten._upsample_bilinear2d_aa.default", (IMAGE, (3, 2), False)),
    ("aten._upsample_bilinear2d_aa_backward.default", (meta(6, 4, 3, 2), (3, 2), (6, 4, 4, 4), False)),
    ("aten._upsample_bicubic2d_aa.default", (IMAGE, (3, 2), True)),
    ("aten._upsample_bicubic2d_aa_backward.default", (meta(6, 4, 3, 2), (3, 2), (6, 4, 4, 4), True)),
    ("aten.grid_sampler_2d.default", (IMAGE, meta(6, 3, 5, 2), 0, 0, False)),
    (
        "aten.grid_sampler_2d_backward.default",
        (meta(6, 4, 3, 5), IMAGE, meta(6, 3, 5, 2), 0, 0, False, (True, True)),
    ),
    ("aten.grid_sampler_3d.default", (VOLUME, meta(6, 3, 1, 5, 3), 0, 0, False)),
    (
        "aten.grid_sampler_3d_backward.default",
        (meta(6, 2, 3, 1, 5), VOLUME, meta(6, 3, 1, 5, 3), 0, 0, False, (True, True)),
    ),
    *[
        entry
        for kind in ("reflection", "replication")
        for dims, x in ((1, meta(6, 4, 4)), (2, IMAGE), (3, VOLUME))
        for entry in (
            (f"aten.{kind}_pad{dims}d.default", (x, (1, 2) * dims)),
            (
                f"aten.{kind}_pad{dims}d_backward.default",
                (meta(*x.shape[:2], *(n + 3 for n in x.shape[2:])), x, (1, 2) * dims),
            ),
        )
    ],
    ("aten.fractional_max_pool2d.default", (IMAGE, (2, 2), (2, 2), meta(6, 4, 2))),
    (
        "aten.fractional_max_pool2d_backward.default",
        (meta(6, 4, 2, 2), IMAGE, (2, 2), (2, 2), integers(6, 4, 2, 2)),
    ),
    ("aten.fractional_max_pool3d.default", (VOLUME, (2, 2, 2), (2, 2, 2), meta(6, 2, 3))),
    (
        "aten.fractional_max_pool3d_backward.default",
        (meta(6, 2, 2, 2, 2), VOLUME, (2, 2, 2), (2, 2, 2), integers(6, 2, 2, 2, 2)),
    ),
    # ---- linear algebra ----
    *[(f"aten.{name}.default", (meta(6, 2, 3, 3),)) for name in LINALG],
    ("aten.linalg_pinv.atol_rtol_tensor", (meta(6, 4, 3),)),
    ("aten.linalg_householder_product.default", (meta(6, 4, 3), meta(6, 3))),
    ("aten.linalg_lu_solve.default", (meta(6, 3, 3), PIVOTS, meta(6, 3, 2))),
    ("aten._linalg_solve_ex.default", (meta(6, 3, 3), meta(6, 3, 2))),
    ("aten._linalg_solve_ex.default", (meta(6, 3, 3), meta(6, 3))),
    ("aten.cholesky_inverse.default", (meta(6, 3, 3),)),
    ("aten.cholesky_solve.default", (meta(6, 3, 2), meta(6, 3, 3))),
    ("aten.diagonal_scatter.default", (meta(3, 6, 4), meta(6, 3), 0, 0, 2)),
    ("aten._euclidean_dist.default", (meta(6, 5), meta(4, 5))),
    ("aten._euclidean_dist.default", (meta(3, 6, 5), meta(3, 4, 5))),
    ("aten._cdist_forward.default", (meta(3, 6, 5), meta(3, 4, 5), 2.0, None)),
    ("aten._cdist_forward.default", (meta(6, 5, 4), meta(6, 4), 1.0, None)),
    ("aten._cdist_forward.default", (meta(1, 5, 4), meta(6, 5, 4), 1.0, None)),
    ("aten._cdist_forward.default", (meta(3, 1, 6, 4), meta(6, 3, 4), 1.0, None)),
    ("aten._cdist_backward.default", (meta(3, 6, 4), meta(3, 6, 5), meta(3, 4, 5), 1.0, meta(3, 6, 4))),
    ("aten._cdist_backward.default", (meta(6, 5, 6), meta(6, 5, 4), meta(6, 4), 1.0, meta(6, 5, 6))),
    ("aten._cdist_backward.default", (meta(6, 5, 6), meta(6, 5, 4), meta(1, 6, 4), 1.0, meta(6, 5, 6))),
    ("aten._cdist_backward.default", (meta(6, 6, 5), meta(6, 4), meta(6, 5, 4), 1.0, meta(6, 6, 5))),
    ("aten._cdist_backward.default", (meta(6, 5, 5), meta(1, 5, 4), meta(6, 5, 4), 1.0, meta(6, 5, 5))),
]
STABLE = [("aten.sort.stable", (X,))]
TRIANGULAR = [
    ("aten.linalg_solve_triangular.default", (meta(6, 3, 3), meta(6, 3, 2))),
    ("aten.linalg_solve_triangular.default", (meta(3, 3), meta(6, 3, 2))),
]
DRAWING = [
    ("hap.bernoulli.default", ((6, 4), 0.3, integers(), 3, None)),
    ("hap.rand.default", ((6, 4, 12), integers(), 3, None)),
    ("hap.randn.default", ((12,), integers(), 3, None)),
    ("hap.randint.default", ((6, 4), -2, 9, integers(), 3, None)),
]
ROUNDING = [("aten.div.Tensor_mode", (X, ROW)), ("aten.div.Scalar_mode", (X, 2.0))]


def sample(op: str, args: tuple, **kwargs: object) -> Call:
    """The call, its outputs found by running it."""
    a_call = call(op, *args, out=(), **kwargs)
    results = run_whole(a_call, sample_inputs(a_call, torch.Generator().manual_seed(0)))
    outputs = tuple(TensorMeta(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in results)
    return replace(a_call, node=replace(a_call.node, outputs=outputs))


def assert_proved(a_call: Call) -> None:
    strategies = [s for row in call_rows(a_call) for s in row_strategies(row, a_call)]
    verdicts = prove_call(a_call, strategies)
    assert [v for v in verdicts if not v.ok] == []


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_every_row_holds(op, args):
    assert_proved(sample(op, args))


@pytest.mark.parametrize(("op", "args"), ROUNDING)
def test_every_row_of_a_rounding_division_holds(op, args):
    assert_proved(sample(op, args, rounding_mode="floor"))


@pytest.mark.parametrize(("op", "args"), DRAWING)
def test_every_dim_of_random_numbers_may_be_sharded(op, args):
    drawn = sample(op, args, dtype=torch.float64)
    assert_proved(drawn)
    assert {row.outputs[0].dim for row in call_rows(drawn)} == set(range(len(args[0])))


@pytest.mark.parametrize(("op", "args"), STABLE)
def test_every_row_of_a_stable_sort_holds(op, args):
    assert_proved(sample(op, args, stable=True, dim=0))


@pytest.mark.parametrize(("op", "args"), TRIANGULAR)
def test_every_row_of_a_triangular_system_holds(op, args):
    assert_proved(sample(op, args, upper=True))


def test_every_rule_has_a_sample():
    assert sorted({op for op, _ in CALLS + STABLE + TRIANGULAR + DRAWING + ROUNDING}) == sorted(BUILTIN)


def test_a_search_by_another_order_has_no_rows():
    found = call("aten.searchsorted.Tensor", meta(5), X, out=(), sorter=integers(5))
    assert len(found.inputs) == 3 and call_rows(replace(found, node=replace(found.node, outputs=(X,)))) == ()


def test_every_rule_is_of_an_operator_that_exists():
    for op in BUILTIN:
        assert callable(resolve(op))


def test_a_max_pool_may_not_follow_its_channels_since_an_empty_share_does_not_run():
    with pytest.raises(RuntimeError):
        torch.ops.aten.max_pool2d_with_indices.default(torch.zeros(6, 0, 4, 4), (2, 2), (2, 2))
    pool = sample("aten.max_pool2d_with_indices.default", (IMAGE, (2, 2), (2, 2)))
    cut = {s.inputs[0].dim for row in call_rows(pool) for s in row_strategies(row, pool)}
    assert cut == {0}
