"""Random draws: reproducible one by one, and never the same uniform twice."""

from __future__ import annotations

import numpy as np

from dspark_trt.runtime.rng import Purpose, random_words, request_key, uniforms, uniforms_float32

PROMPT = np.arange(5)
KEY = request_key(7, PROMPT, 0)


def test_a_draw_is_a_function_of_step_slot_and_purpose_alone() -> None:
    few = random_words(KEY, step_index=3, num_slots=1)
    many = random_words(KEY, step_index=3, num_slots=8)
    assert (few == many[:1]).all()
    assert many.shape == (8, len(Purpose))


def test_no_word_is_used_twice() -> None:
    """False alarm: 2e4 words of 64 bits collide with probability 1e-11; the draws are fixed."""
    keys = [request_key(seed, PROMPT + shift, index) for seed in (0, 1) for shift in (0, 1) for index in (0, 1)]
    assert len(set(keys)) == 8
    words = [random_words(key, step_index=step, num_slots=8) for key in keys for step in range(80)]
    flat = np.concatenate(words).ravel()
    assert len(np.unique(flat)) == len(flat) == 8 * 80 * 8 * 4


def test_the_key_tells_seed_and_sequence_index_apart() -> None:
    assert request_key(1, PROMPT, 2) != request_key(2, PROMPT, 1)
    assert request_key(1, PROMPT, 2) == request_key(1, PROMPT.copy(), 2)
    assert request_key(2**64 - 1, PROMPT, 0) != request_key(0, PROMPT, 0)


def test_the_stream_is_pinned() -> None:
    """A seed must give the same tokens after an upgrade."""
    assert KEY == (17917198869801673300, 9068950893868809194)
    assert random_words(KEY, step_index=1, num_slots=2)[1].tolist() == [
        11212096768758941961,
        9407949961364304533,
        9990322908230135672,
        6552036558622216875,
    ]


def test_uniforms_are_below_one_and_even() -> None:
    top = np.array([2**64 - 1], dtype=np.uint64)
    assert uniforms(top)[0] < 1.0
    assert uniforms_float32(top)[0] < np.float32(1.0)
    for total in (1.0, 1.5, 1.0000001, 3.0, 0.1):
        assert uniforms(top)[0] * total < total
    words = random_words(KEY, step_index=0, num_slots=5000).ravel()
    for values in (uniforms(words), uniforms_float32(words)):
        counts = np.histogram(values, bins=20, range=(0, 1))[0]
        assert abs(counts - 1000).max() < 160  # 5 standard deviations of 31


def philox_4x64(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox 4x64-10 as published (Salmon et al. 2011), in plain integers."""
    mask = 2**64 - 1
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        low, high = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & mask, (low >> 64) ^ c3 ^ k1, low & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def test_slot_and_step_index_are_the_counter() -> None:
    words = random_words(KEY, step_index=9, num_slots=3)
    for slot in range(3):
        assert words[slot].tolist() == philox_4x64((slot + 1, 9, 0, 0), KEY)
