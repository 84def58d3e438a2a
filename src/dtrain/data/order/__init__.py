"""Which sample stands where: orders of an epoch as pure functions of seed, epoch and position."""
