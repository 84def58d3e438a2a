"""Operations on images, each on a whole batch with an amount for every image."""
