"""Kernels of a training step, sorted into kinds by their names and by the function that launched them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dagrl.bench.train_parts import kind_of, step_parts


@dataclass
class Kernel:
    name: str
    duration: float


@dataclass
class FakeEvent:
    name: str
    kernels: list[Kernel] = field(default_factory=list)
    cpu_parent: FakeEvent | None = None


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1_kernel0_0", "attention"),
        ("_norm_backward_kernel", "norms"),
        ("_swiglu_kernel", "swiglu"),
        ("void transformer_engine::block_scaled_1d_cast_transpose_kernel<__nv_fp8_e4m3>", "quantization"),
        ("_row_gradients", "vocabulary sums"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ],
)
def test_kernels_have_kinds(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_products_of_the_output_layer_are_apart() -> None:
    layer = FakeEvent("_TokenLogprobsBackward")
    product = Kernel("nvjet_tst", 2000.0)
    events = [
        FakeEvent("aten::mm", [product], cpu_parent=FakeEvent("autograd::engine::evaluate_function", cpu_parent=layer)),
        FakeEvent("aten::mm", [product, product]),
        FakeEvent("Command Buffer Full", [product]),  # one of those above
        layer,
    ]
    assert step_parts(events) == {"products": 4.0, "output layer": 2.0}
