"""A launch in progress: memories, warps and CTAs, asynchronous work, race checks, and who runs next."""
