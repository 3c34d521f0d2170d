import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.health.statistics.sampling import SAMPLE, Offsets, sample, spacing
from narrowcast.health.statistics.statistics import RUN
from narrowcast.kernels.launch import interpreted
from narrowcast.kernels.samples import SampleKernel

DEVICE = torch.device("cpu" if interpreted() else "cuda")
OFFSETS = Offsets(DEVICE)
BOTH = {"single": OFFSETS.single, "runs": OFFSETS.runs}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=12)
@given(
    tensors=st.lists(
        st.tuples(
            st.sampled_from([1, 7, 128, 3000, 4095, 4096, 5000, 12800, 9001]),
            st.sampled_from(DTYPES),
            st.sampled_from([1, RUN]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_row_is_what_torch_takes_of_the_tensor(tensors):
    drawn = [torch.randn(n, device=DEVICE).to(dtype) for n, dtype, _ in tensors]
    into = torch.full((len(drawn), SAMPLE), 9.0, device=DEVICE)
    kernel = SampleKernel([spacing(n, run=run) for n, _, run in tensors], **BOTH)
    for step in range(2):
        OFFSETS.draw(step)
        kernel(drawn, into)
        for row, x, (_, _, run) in zip(into, drawn, tensors, strict=True):
            offsets = OFFSETS.single if run == 1 else OFFSETS.runs
            assert torch.equal(row, sample(x, offsets).float())


def test_tensors_move_change_their_dtype_and_go_away():
    shapes = [(64, 128), (40, 128)]
    kernel = SampleKernel([spacing(a * b, run=1) for a, b in shapes], **BOTH)
    into = torch.zeros(2, SAMPLE, device=DEVICE)
    for dtypes in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        drawn = [torch.randn(s, device=DEVICE).to(d) for s, d in zip(shapes, dtypes, strict=True)]
        kernel(drawn, into)
        assert torch.equal(into[0], sample(drawn[0], OFFSETS.single).float())
        assert torch.equal(into[1], sample(drawn[1], OFFSETS.single).float())
        kernel([drawn[0], None], into)
        assert torch.equal(into[0], sample(drawn[0], OFFSETS.single).float())
        assert not into[1].any()


def test_what_lies_otherwise_in_memory_is_taken_as_it_is_written():
    x = torch.randn(128, 96, device=DEVICE).t()
    into = torch.zeros(1, SAMPLE, device=DEVICE)
    SampleKernel([spacing(x.numel(), run=1)], **BOTH)([x], into)
    assert torch.equal(into[0], sample(x, OFFSETS.single))


def test_on_a_gpu_nothing_waits_for_the_device(host_never_waits):
    x = [torch.randn(512, 512, device="cuda") for _ in range(3)]
    kernel = SampleKernel([spacing(t.numel(), run=1) for t in x], **BOTH)
    into = torch.zeros(3, SAMPLE, device="cuda")
    kernel(x, into)
    with host_never_waits():
        kernel(x[::-1], into)
    assert torch.equal(into[0], sample(x[2], OFFSETS.single))
