"""Operations on all servers of a pool, and what servers that were away have missed of them."""
