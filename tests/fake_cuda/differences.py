"""Tests of the CPU's suite that do not hold on the stand-in for a GPU, and why: by name, in the whole suite or by
parameters. What holds on neither is a fault, and is not listed."""

THREADS = "torch's tensors stand for those of a GPU on one thread only"
ORDER = "NCCL adds in an order of its own, rounded at each step: equal on all ranks, not between layouts"
CPU_WIRE = "how a process group carries what travels between hosts; gradients go through NCCL"
CPU_PACK = "gradients are packed bucket by bucket on a GPU, not one by one"
NANS = "NCCL's minimum and maximum leave NaN out, as fmin and fmax do"
DEVICES = "torch's tensors are on the GPU here, NumPy's arrays are not"
TRACE = "reductions are in the trace once the host noticed that they are done, which may be later"
STORAGES = "the stand-in knows a storage by its first size; torch's collectives of objects resize theirs"
FINALIZERS = "Python drops an interrupt that comes in what the stand-in does at the end of a tensor"
WIDE = "there is no kernel between fp64 and narrower types, which is an error that says so"
DRAIN = "the stand-in's host waits at the end for collectives whose peer has gone"

DIFFERENT = {
    "test_wide_gradients_that_travel_in_fp32": WIDE,
    "test_bucket_layouts_give_bitwise_the_same_gradients": ORDER,
    "test_the_mean_is_right_up_to_rounding_and_equal_on_all_ranks[3-wire0-shm]": ORDER,
    "test_the_mean_is_right_up_to_rounding_and_equal_on_all_ranks[3-wire1-shm]": ORDER,
    "test_two_backwards_at_once_on_two_threads_are_refused_and_the_iteration_fails_everywhere": THREADS,
    "test_a_backward_on_another_thread_than_the_forward_and_the_one_before_is_reduced": THREADS,
    "test_one_backward_that_moves_between_threads_is_reduced": THREADS,
    "test_over_a_process_group_gradients_travel_in_16_bits_too": CPU_WIRE,
    "test_the_slots_behind_an_unused_one_do_not_wait_for_the_end_of_backward": CPU_PACK,
    "test_half_as_many_bytes_travel": TRACE,
    "test_an_interrupt_while_an_operation_is_started_ends_every_rank": CPU_WIRE,
    "test_a_nan_of_any_rank_is_the_minimum_and_the_maximum[nccl]": NANS,
    "test_what_one_library_has_is_gathered_into_an_array_of_another": DEVICES,
    "test_a_run_resumed_from_a_distributed_checkpoint_goes_on_as_if_never_interrupted": STORAGES,
    "test_an_interrupt_ends_every_rank_that_works[training-shm]": FINALIZERS,
    "test_an_interrupt_ends_every_rank_that_works[training-c10d]": FINALIZERS,
    "test_a_wrapper_that_is_dropped_fails_the_peers_that_train_on": DRAIN,
}


def reason(name: str) -> str | None:
    """Why a test, by its name with its parameters, is different; None: it is not."""
    return DIFFERENT.get(name, DIFFERENT.get(name.partition("[")[0]))
