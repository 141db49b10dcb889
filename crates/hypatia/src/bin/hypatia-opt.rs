//! Optimizes a program given as text: no Python, no torch.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use hypatia::cost::Target;
use hypatia::ir::text::{self, Weights};
use hypatia::{Optimized, Options, optimize};

/// Optimizes a tensor program by equality saturation.
///
/// The program is an s-expression; inputs carry their shapes:
///
///   echo '(relu (linear w:[512,784] b:[512] x:[64,784]))' | hypatia-opt
///
/// Inputs whose names start with w or b count as frozen weights (see --live).
///
/// The exit code is 0, 1 if a proof that was asked for does not hold, 2 if the program cannot be read or optimized.
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Cli {
    /// File with the program; standard input if absent or '-'
    file: Option<PathBuf>,
    /// Print the proof, step by step, and check it again in float64
    #[arg(long)]
    explain: bool,
    /// Machine to optimize for: cpu, h200 or gpu
    #[arg(long, default_value = "cpu")]
    target: String,
    /// No input is a frozen weight
    #[arg(long)]
    live: bool,
    /// Limit on the number of nodes that the search may add
    #[arg(long, default_value_t = 20_000)]
    nodes: usize,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok((text, holds)) => {
            print!("{text}");
            if holds { ExitCode::SUCCESS } else { ExitCode::from(1) }
        }
        Err(message) => {
            eprintln!("hypatia-opt: {message}");
            ExitCode::from(2)
        }
    }
}

/// What to print, and whether the proof holds, if it was asked for.
fn run(cli: &Cli) -> Result<(String, bool), String> {
    let (name, source) = read(cli)?;
    let weights = if cli.live { Weights::Live } else { Weights::Frozen };
    let program = text::parse(&source, weights).map_err(|e| format!("{name}:{e}"))?;
    let names: Vec<String> = Target::all().map(|t| t.name).into();
    let mut options = Options {
        target: Target::named(&cli.target)
            .ok_or_else(|| format!("unknown target '{}'; known: {}", cli.target, names.join(", ")))?,
        ..Options::default()
    };
    options.limits.nodes = cli.nodes;
    let optimized = optimize(&program, &options).map_err(|e| e.to_string())?;
    let mut out = summary(&optimized);
    let mut holds = true;
    if cli.explain {
        let (text, held) = proof(&optimized)?;
        out.push_str(&text);
        holds = held;
    }
    Ok((out, holds))
}

fn read(cli: &Cli) -> Result<(String, String), String> {
    match &cli.file {
        Some(path) if path.as_os_str() != "-" => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|e| format!("{name}: {e}"))?;
            Ok((name, text))
        }
        _ => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .map_err(|e| format!("standard input: {e}"))?;
            Ok(("<stdin>".into(), text))
        }
    }
}

fn summary(o: &Optimized) -> String {
    let rules = o.proof.as_ref().map(|p| p.rules()).unwrap_or_default();
    let rules: Vec<String> = rules
        .iter()
        .map(|(n, k)| if *k > 1 { format!("{n} x{k}") } else { n.clone() })
        .collect();
    let rules = if rules.is_empty() {
        "none".into()
    } else {
        rules.join(", ")
    };
    let gap = if o.cost_after > 0.0 {
        100.0 * (o.cost_after - o.lower_bound) / o.cost_after
    } else {
        0.0
    };
    format!(
        "{}\n; cost {:.2} -> {:.2} us on {} (at most {gap:.1}% above the optimum), rules: {rules}\n",
        text::print(&o.output),
        o.cost_before,
        o.cost_after,
        o.target,
    )
}

fn proof(o: &Optimized) -> Result<(String, bool), String> {
    let Some(proof) = &o.proof else {
        return Ok((String::new(), true));
    };
    let mut out = format!("; proof, {} steps\n", proof.steps.len());
    for (i, step) in proof.steps.iter().enumerate() {
        let (before, after) = proof.step_text(step).map_err(|e| e.to_string())?;
        let direction = if step.forward { "" } else { " (right to left)" };
        out.push_str(&format!(
            "; {}. {}{direction}\n;    {before}\n;  = {after}\n",
            i + 1,
            step.rule
        ));
    }
    let replay = proof.replay(0, 1e10).map_err(|e| e.to_string())?;
    out.push_str(&format!(
        "; checked: {} steps evaluated in float64, {} skipped, largest relative difference {:.1e}, {}\n",
        replay.evaluated,
        replay.skipped,
        replay.worst,
        if replay.holds() {
            "the proof holds"
        } else {
            "THE PROOF DOES NOT HOLD"
        }
    ));
    for failure in &replay.failures {
        out.push_str(&format!("; {failure}\n"));
    }
    Ok((out, replay.holds()))
}
