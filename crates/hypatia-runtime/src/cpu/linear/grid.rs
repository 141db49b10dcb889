//! How a result is cut into parts for threads.

/// How many of `threads` to use for `m`×`n` sums of `k` terms: one, unless multiplications or weights exceed `alone`.
pub fn share(threads: usize, (m, n, k): (usize, usize, usize), alone: (usize, usize)) -> usize {
    let weights = n.saturating_mul(k);
    match weights.saturating_mul(m) <= alone.0 && weights <= alone.1 {
        true => 1,
        false => threads.max(1),
    }
}

/// Rectangles of a result that threads claim one at a time.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    m: usize,
    n: usize,
    rows: usize,
    columns: usize,
    across: usize,
    down: usize,
}

/// What it costs to fetch an element of an operand, in multiplications that could be made meanwhile.
const FETCH: usize = 32;

/// Parts of a thread at least where they are cut by what a core's cache holds.
const TILES: usize = 4;

/// Parts of a thread where they may be small.
const STRIPS: usize = 16;

impl Grid {
    /// Cuts `m`×`n` into parts of at most `max_rows` rows; cuts fall on multiples of `units`.
    pub fn new(threads: usize, (m, n): (usize, usize), units: (usize, usize), max_rows: usize) -> Grid {
        let (row_units, column_units) = (m.div_ceil(units.0).max(1), n.div_ceil(units.1).max(1));
        let least = m.div_ceil(max_rows.max(units.0)).max(1);
        let mut best: Option<(usize, Grid)> = None;
        for down in (least..least + threads.min(16)).take_while(|&d| d <= row_units) {
            for rounds in 1..4 {
                let rows = row_units.div_ceil(down) * units.0;
                let wanted = (threads * rounds).div_ceil(down).min(column_units);
                let columns = column_units.div_ceil(wanted) * units.1;
                let (down, across) = (m.div_ceil(rows).max(1), n.div_ceil(columns).max(1));
                let part = rows.min(m) * columns.min(n) + FETCH * (rows.min(m) + columns.min(n));
                let cost = (down * across).div_ceil(threads) * part;
                if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                    best = Some((
                        cost,
                        Grid {
                            m,
                            n,
                            rows,
                            columns,
                            across,
                            down,
                        },
                    ));
                }
            }
        }
        best.map_or(
            Grid {
                m,
                n,
                rows: m.max(1),
                columns: n.max(1),
                across: 1,
                down: 1,
            },
            |(_, grid)| grid,
        )
    }

    /// Cuts `m`×`n` into even parts of at most `most` rows and columns, which are halved down to `least` until a thread whose
    /// core is slow at the time can leave some to the others; None if there would be few. Cuts fall on multiples of `units`.
    pub fn tiles(
        threads: usize,
        (m, n): (usize, usize),
        units: (usize, usize),
        most: (usize, usize),
        least: (usize, usize),
    ) -> Option<Grid> {
        let even = |size: usize, unit: usize, most: usize| {
            let parts = size.div_ceil(most.max(1)).max(1);
            size.div_ceil(parts).max(1).next_multiple_of(unit)
        };
        let mut size = most;
        while size.0 >= least.0 && size.1 >= least.1 {
            let (rows, columns) = (even(m, units.0, size.0), even(n, units.1, size.1));
            let (down, across) = (m.div_ceil(rows).max(1), n.div_ceil(columns).max(1));
            if down * across >= TILES * threads {
                return Some(Grid {
                    m,
                    n,
                    rows,
                    columns,
                    across,
                    down,
                });
            }
            match size.1 >= 2 * size.0 {
                true => size.1 /= 2,
                false => size.0 /= 2,
            }
        }
        None
    }

    /// Cuts `m`×`n` into parts of all rows and a few columns, a multiple of `unit`. Where weights set the pace, small
    /// parts cost nothing and let a fast thread help a slow one.
    pub fn strips(threads: usize, (m, n): (usize, usize), unit: usize) -> Grid {
        let units = n.div_ceil(unit).max(1);
        let columns = units.div_ceil(threads.max(1) * STRIPS) * unit;
        Grid {
            m,
            n,
            rows: m.max(1),
            columns,
            across: n.div_ceil(columns).max(1),
            down: 1,
        }
    }

    /// Cuts `m`×`n` into parts of all columns and a few rows, a multiple of `unit` and at most `max_rows` of them. Where
    /// weights stay in cache, small parts cost little, too.
    pub fn bands(threads: usize, (m, n): (usize, usize), unit: usize, max_rows: usize) -> Grid {
        let units = m.div_ceil(unit).div_ceil(threads.max(1) * STRIPS);
        let mut rows = units.clamp(2, (max_rows / unit).max(2)) * unit;
        // A last part of a row or two would take as long as one of a unit.
        while rows < m && (1..=unit / 2).contains(&(m % rows)) {
            rows += unit;
        }
        Grid {
            m,
            n,
            rows,
            columns: n.max(1),
            across: 1,
            down: m.div_ceil(rows).max(1),
        }
    }

    pub fn parts(&self) -> usize {
        self.across * self.down
    }

    /// The rows and the columns of a part.
    pub fn part(&self, part: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (row, column) = (part / self.across * self.rows, part % self.across * self.columns);
        (
            row..(row + self.rows).min(self.m),
            column..(column + self.columns).min(self.n),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_every_element_once(
            m in 0usize..300, n in 0usize..300, threads in 1usize..9, mu in 1usize..40, nu in 1usize..40, most in 1usize..300
        ) {
            let grid = Grid::new(threads, (m, n), (mu, nu), most);
            prop_assert!((0..grid.parts()).all(|part| grid.part(part).0.len() <= most.max(mu).next_multiple_of(mu)));
            let tiles = Grid::tiles(threads, (m, n), (mu, nu), (most, 2 * most), (most.div_ceil(4), most.div_ceil(3)));
            prop_assert!(tiles.is_none_or(|grid| grid.parts() >= TILES * threads));
            let others = [Grid::strips(threads, (m, n), nu), Grid::bands(threads, (m, n), mu, m)];
            for grid in [Some(grid), tiles].into_iter().flatten().chain(others) {
                let mut seen = vec![0u8; m * n];
                for part in 0..grid.parts() {
                    let (rows, columns) = grid.part(part);
                    prop_assert!(rows.start % mu == 0 && columns.start % nu == 0);
                    for r in rows {
                        columns.clone().for_each(|c| seen[r * n + c] += 1);
                    }
                }
                prop_assert!(seen.iter().all(|&s| s == 1));
            }
        }
    }
}
