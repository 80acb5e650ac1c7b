"""The three GEMMs and the two attentions against float64."""

from __future__ import annotations

import math

import pytest
import torch

from engine.errors import UserError
from engine.layers import Attention, attend, rms_norm, silu_mul
from engine.linear import make_linear, packed_available


@pytest.mark.parametrize("gemm", ["library", "transposed", "packed"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_equals_float64(gemm: str, rows: int, biased: bool, dtype: torch.dtype) -> None:
    if gemm == "packed" and not packed_available("cpu", dtype):
        pytest.skip("no oneDNN layout here")
    weight, x = torch.randn(37, 53).to(dtype), torch.randn(rows, 53).to(dtype)
    bias = torch.randn(37).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = make_linear(weight, bias, gemm)(x)  # type: ignore[arg-type]
    assert out.shape == (rows, 37)
    assert out.dtype == dtype
    assert out.is_contiguous()
    limit = 1e-4 if dtype == torch.float32 else 0.02 * expected.abs().max().item()
    assert (out.double() - expected).abs().max() < limit


def test_packed_is_refused_where_there_is_no_such_layout() -> None:
    weight = torch.randn(8, 8, dtype=torch.float64)
    assert not packed_available("cpu", torch.float64)
    with pytest.raises(UserError, match="gemm=packed needs oneDNN"):
        make_linear(weight, None, "packed")


@pytest.mark.parametrize("kind", ["sdpa", "grouped"])
@pytest.mark.parametrize("mode", ["causal", "tree", "open"])
@pytest.mark.parametrize(("rows", "committed"), [(1, 9), (5, 0), (6, 13)])
def test_attention_equals_float64(kind: str, mode: str, rows: int, committed: int) -> None:
    kv_heads, group, head_dim = 3, 4, 10
    q = torch.randn(rows, kv_heads * group, head_dim)
    k, v = torch.randn(2, kv_heads, committed + rows, head_dim)
    tree = torch.rand(rows, rows) < 0.4
    tree.fill_diagonal_(True)
    own = {"causal": torch.ones(rows, rows).tril() > 0, "tree": tree, "open": torch.ones(rows, rows) > 0}[mode]
    attention = Attention(
        kind,  # type: ignore[arg-type]
        rows,
        committed,
        group,
        tree if mode == "tree" else None,
        torch.device("cpu"),
        causal=mode != "open",
    )
    out = attend(q, k, v, attention)
    assert out.shape == (rows, kv_heads * group * head_dim)
    for row in range(rows):
        seen = torch.cat([torch.ones(committed, dtype=torch.bool), own[row]])
        for head in range(kv_heads * group):
            keys, values = k[head // group, seen].double(), v[head // group, seen].double()
            weights = torch.softmax(keys @ q[row, head].double() / math.sqrt(head_dim), dim=0)
            got = out[row, head * head_dim : (head + 1) * head_dim]
            assert (got.double() - weights @ values).abs().max() < 1e-5


def test_norm_and_activation_equal_float64() -> None:
    x, weight, up = torch.randn(5, 23) * 3, torch.rand(23) + 0.5, torch.randn(5, 23)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert (rms_norm(x, weight, 1e-5).double() - expected).abs().max() < 1e-5
    assert (rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5).double() - expected).abs().max() < 0.1
    before = x.clone()
    assert (silu_mul(x, up).double() - wide * torch.sigmoid(wide) * up.double()).abs().max() < 1e-5
    assert torch.equal(x, before)
