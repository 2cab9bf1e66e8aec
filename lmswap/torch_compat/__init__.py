"""The seam to torch: all of its private names that lmswap uses, one module per part of torch.

Nothing else in lmswap imports or reaches a private name of torch, and nothing here knows lmswap. tests/torch_compat
checks both, and that each name exists in the installed torch. Workarounds name the torch in which the behavior was last
seen and the upstream issue or pull request, as pytorch#NUMBER. To support another torch, change `versions`, run the
tests, and look up those numbers: what upstream has fixed in all supported versions is to be removed.
"""
