"""The nets of the zoo, by topic; `tests.zoo` puts them in one table."""
