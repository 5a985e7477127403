"""Operations of a store, each made of many requests: a pure plan and a short executor."""
