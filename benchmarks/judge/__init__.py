"""Networks that no constant was set by, at every budget that lmswap accepts: is it kept, used, and predicted?"""
