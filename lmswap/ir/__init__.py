"""Data types shared by all stages: frozen, torch-free, with JSON and text forms. They decide nothing.

Glossary, one term per idea, used everywhere in lmswap; synonyms of the literature in parentheses:

program        the ops of one training step in order: forward, then backward
position       "just before op p"; intervals of positions are half-open
buffer         a storage, shared by all values that alias it: the unit that is swapped
segment        a run of ops that one compiled function executes
lifetime       the positions between which a buffer occupies memory (live range; `LiveRange`)
gap            a part of a lifetime without a use (idle interval)
action         what a plan does with a buffer in a gap: keep, swap or recompute (`Decision`)
resident       occupying device memory
swap           one trip of a buffer to a tier and back (`Swap`)
swap out       to copy a buffer from the device to a tier (offload)
prefetch       to copy it back before its next use (swap in, reload)
release        the position from which a swapped buffer's device memory is free (evict)
recompute      to drop a buffer and run its op again (rematerialization, checkpointing; `Recompute`)
schedule       the ops that run under a plan, recomputes included
plan           swaps and recomputes with positions and offsets
tier           memory that holds swapped bytes: pinned or compressed host memory, disk, another GPU
host copy      the bytes of a buffer in a tier (backing store)
link           the path to a tier: seconds by size, out (from the device) and in
lane           a queue beside compute: out, in; across ranks also the network (stream)
stall          compute waiting for a copy
arena          the device memory in which a step's large tensors have planned offsets
fragmentation  free bytes of the arena that no tensor can use
result         an output or gradient that a step returns to its caller
scratch        bytes an op allocates and frees while it runs (workspace)
loss           the op that stands for the caller's code after a forward segment
budget         the bytes that the device may hold at any time; the peak is the most it does hold
margin         bytes of the budget that are reserved for what no prediction covers
timeline       what ran when, predicted or measured (trace)
calibrate      to correct costs and link rates to a measured step
replan         to plan again once a step has shown an assumption wrong
certificate    a lower bound on the seconds of any plan, with the prices that prove it
price          seconds per byte at a cut, or per second of a lane (dual variable)
rank           one of several processes that train a model together
node           the ranks of one machine (local ranks)
network        how ranks reach each other; an all-reduce sums a tensor over all of them
bucket         gradients that are all-reduced together
size bucket    sizes that share a plan: four from one power of two to the next
unplanned peak the peak of a step that keeps every buffer
roofline       an op's seconds by its flops or its bytes, whichever takes longer
graph break    where `torch.compile` cannot trace on; the model is then several graphs
hooks          saved-tensor hooks of torch, called with each tensor saved for the backward
"""
