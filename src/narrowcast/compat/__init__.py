"""The vocabulary of other training libraries, on narrowcast's engine."""
