"""What the engine itself costs on a GPU, in instructions per gradient and per bucket, over stand-ins.

cost/counts.py says what is counted. What happens once an iteration is held to no bar.
"""

import os

import pytest
from cost import counts
from cost.counts import Cost

INSTRUCTIONS_PER_GRADIENT = 300
INSTRUCTIONS_PER_BUCKET = 3000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # builds the engine without the rest


def missing(what):
    if os.environ.get("GPUCOMM_TEST_COST") == "required":
        pytest.fail(f"{what} is not here")
    pytest.skip(f"{what} is not here (Debian, Ubuntu: apt-get install valgrind libgtest-dev)")


@pytest.fixture(scope="module")
def program():
    if not counts.has_valgrind():
        missing("valgrind")
    try:
        return counts.build()
    except RuntimeError as error:
        if "GoogleTest is missing" in str(error):
            missing("GoogleTest")
        raise


each_kind = pytest.mark.parametrize("kind", counts.KINDS)


@each_kind
def test_a_gradient_costs_few_instructions(program, kind):
    assert 0 < counts.per_gradient(program, kind).instructions <= INSTRUCTIONS_PER_GRADIENT


@each_kind
def test_a_bucket_costs_few_instructions(program, kind):
    assert 0 < counts.per_bucket(program, kind).instructions <= INSTRUCTIONS_PER_BUCKET


@each_kind
def test_gradients_and_buckets_take_no_memory(program, kind):
    assert counts.per_gradient(program, kind).allocations == 0
    assert counts.per_bucket(program, kind).allocations == 0


@each_kind
def test_a_gradient_calls_no_library_and_a_bucket_nccl_once(program, kind):
    gradient, bucket = counts.per_gradient(program, kind), counts.per_bucket(program, kind)
    assert (gradient.driver_calls, gradient.nccl_calls) == (0, 0)
    assert bucket.nccl_calls == 1


def test_an_instruction_beside_a_gradient_is_counted(program):
    padded, plain = (counts.cost(program, counts.MANY, 1, kind) for kind in ("padded", "plain"))
    assert padded - plain == Cost(counts.MANY * counts.PADDING, 0, 0, 0)


@each_kind
def test_what_is_not_counted_was_spent_in_calls_of_the_stand_ins(program, kind):
    for profile in counts.profiles(program, counts.MANY, counts.BUCKETS, kind):
        spent = counts.stand_in_calls(profile, program)
        assert all(name.startswith(("cu", "nccl")) for name in spent), spent
        assert sum(profile.own.values()) == counts.cost_in(profile, program).instructions + sum(spent.values())


@each_kind
def test_an_iteration_costs_what_the_one_before_did(program, kind):
    profiles = counts.profiles(program, counts.MANY, counts.BUCKETS, kind)
    found = [counts.cost_in(profile, program).instructions for profile in profiles]
    assert len(found) == 3
    assert max(found) - min(found) < 0.01 * min(found)
