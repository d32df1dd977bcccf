"""``penstock bench soak``: hours of mixed load with deaths, every token of which is accounted for."""
