"""A plan as it is printed: who does what, node by node, how long ranks wait, what they send."""

from __future__ import annotations

from trainer.plan.parallel_plan import ParallelPlan, ParallelRequest, RankLayout, resolve_parallel
from trainer.plan.plan_text import MAX_ROWS, collectives_of, describe_plan


def described(nodes: int, share: int, **asked: object) -> str:
    layout = RankLayout(num_nodes=nodes, ranks_per_node=share)
    plan = resolve_parallel(ParallelRequest(**asked), layout).plan  # type: ignore[arg-type]
    return "\n".join(describe_plan(plan, layout))


def test_every_axis_of_a_plan_is_laid_out_over_the_nodes() -> None:
    assert (
        described(2, 4, strategy="pipeline", pp=2, tp=2, grad_accum_steps=2)
        == """\
pipeline on 8 ranks of 2 nodes: pp 2 × dp_replicate 2 × dp_shard 1 × tp 2

  node  ranks  stages  data part
  0     0-1    0       0
  0     2-3    0       1
  1     4-5    1       0
  1     6-7    1       1

pp 2: ranks 0, 4, the first of 4 groups
dp_replicate 2: ranks 0, 2, the first of 4 groups
tp 2: ranks 0, 1, the first of 4 groups

1F1B, 2 stages, 8 micro-batches, bubble 11.1%, 2 gradient accumulation parts

sent in each step:
  pp: send of activations to the next stage, 16 times per pipeline
  pp: send of their gradients back, 16 times per pipeline
  tp: all-reduce of activations, 16 times per pair of split layers
  tp: all-reduce of gradients of activations, 16 times per pair of split layers
  dp_replicate: all-reduce of gradients, once per bucket of 25 MiB"""
    )


def test_stages_of_a_v_lie_on_the_ranks_that_run_them() -> None:
    text = described(1, 4, strategy="pipeline", pp=2, dp_shard=2, schedule="ZBVZeroBubble", cut_points=(1, 2, 5))

    assert "  0     0-1    0, 3    0-1\n  0     2-3    1, 2    0-1\n" in text
    assert "4 stages cut at [1, 2, 5], 8 micro-batches, bubble 2.0%" in text
    # Of the three steps from stage to stage the middle one stays on its rank.
    assert "activations to the next stage, 16 times per pipeline" in text


def test_a_long_table_is_shortened_and_says_by_how_much() -> None:
    lines = described(64, 8, strategy="hsdp").splitlines()
    rows = lines[2 : lines.index("", 2)]

    assert len(rows) == MAX_ROWS + 2
    assert rows[-2].split() == ["…", "52", "more"]
    assert rows[-1].split() == ["63", "504-511", "504-511"]
    assert "dp_replicate 64: ranks 0, 8, 16, 24, …, 504, the first of 8 groups" in lines


def test_one_rank_needs_no_table_and_auto_is_yet_to_be_chosen() -> None:
    assert described(1, 1) == "single on 1 rank of one node: pp 1 × dp_replicate 1 × dp_shard 1 × tp 1"
    assert described(2, 2, strategy="auto").startswith("auto on 4 ranks of 2 nodes: the ranks choose the plan")


def test_shards_are_gathered_twice_for_each_part_and_inside_a_pipeline_once() -> None:
    def gathers(plan: ParallelPlan) -> list[int]:
        return [one.times for one in collectives_of(plan) if one.kind == "all-gather"]

    assert gathers(ParallelPlan(dp_shard=4, grad_accum_steps=3)) == [6]
    assert gathers(ParallelPlan(pp=2, dp_shard=4, micro_batches=8, grad_accum_steps=3)) == [3]
    assert gathers(ParallelPlan(dp_replicate=4)) == []
