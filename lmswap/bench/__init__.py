"""Networks that `lmswap bench` trains, each a folder with its data and commands; they need the extra `bench`."""
