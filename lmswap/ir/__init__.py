"""The data that every stage shares: frozen, torch-free, with JSON and text forms. It decides nothing.

Glossary, one word per idea, used everywhere in lmswap:

program    the ops of one training step in schedule order: forward, then backward
position   a time: "just before op p"; intervals of positions are half-open
buffer     a storage, shared by all values that alias it; what occupies memory and is swapped
value      a tensor of the graph: one view of a buffer
segment    a run of ops that one compiled function executes
live range the positions between which a buffer occupies memory; a gap is a stretch of it without a use
tier       where swapped bytes live: host (pinned or compressed memory) or disk; the device is not a tier
link       the path to a tier: seconds by size, out (away from the device) and in
swap       one trip of a buffer to a tier and back
release    the position from which the device memory of a swapped buffer is free
recompute  to drop a buffer and make it again by a recompute, a second run of the op that made it
keep       the opposite decision: the buffer stays on the device
certificate  a bound on the seconds of any plan for this order of ops, with the prices that prove it
schedule   what runs under a plan, recomputes included: a program again
lane       a queue that runs beside compute: out, in; across ranks also the network
rank       one of several processes that train a model together, each on data and a device of its own
node       the ranks of one machine, which share its links, memory and disk
network    how ranks reach each other; an all-reduce sums a tensor over all of them
bucket     gradients that are summed over ranks in one all-reduce
stall      compute waiting for a copy
arena      the device memory in which a step's large tensors lie, each at its place; an opening makes places free
result     what a step hands over to its caller, outputs and gradients; it lies beside the arena
budget     the bytes that the device may hold at any time; peak is what it does hold at most
scratch    bytes an op allocates and frees while it runs
loss       the op that stands for the caller's code behind a forward segment; what that takes is its scratch
timeline   what ran when, predicted by the simulator or measured in a run
"""
