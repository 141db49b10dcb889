"""Speed on a CPU, section by section; ``bench/cpu.py`` runs them."""
