//! The `nccl-rdma` command: looks at, proves and measures the plugin through nothing but the table that NCCL uses.

mod abi;
mod devices;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Looks at, proves and measures libnccl-net-rdma.so, the NCCL network plugin over RDMA.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct PluginArg {
    /// The plugin: a path, or a name as NCCL_NET_PLUGIN takes it [default: ../lib/libnccl-net-rdma.so beside this
    /// command, then the dynamic linker's search]
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
}

impl PluginArg {
    fn path(&self) -> PathBuf {
        self.plugin.clone().unwrap_or_else(abi::default_plugin)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print what NCCL would be told about the devices of this machine, and why others are left out
    Devices {
        #[command(flatten)]
        plugin: PluginArg,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Devices { plugin, json } => devices::run(&plugin.path(), json),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nccl-rdma: {error:#}");
            ExitCode::FAILURE
        }
    }
}
