"""What is done to the weights themselves: averages of them, which of them train, where they are kept in step."""
