//! `nccl-rdma devices`: what NCCL would be told by the plugin on this machine, and what the plugin said about the rest.

use std::path::Path;

use anyhow::{Context as _, bail};
use comfy_table::{Table, presets};
use nccl_net_rdma::config::Config;
use nccl_net_rdma::net;

use crate::abi::{self, LogLine, Plugin, Properties};

#[derive(serde::Serialize)]
struct Report<'a> {
    plugin: &'a Path,
    network: &'a str,
    devices: &'a [Properties],
    log: &'a [LogLine],
    /// NICs, GPUs and the ways between them. To read it takes no plugin: the plugin's words have the same for people.
    machine: net::Shown<'a>,
}

/// Prints the devices; an error where there is none that NCCL could use.
pub(crate) fn run(path: &Path, json: bool) -> anyhow::Result<()> {
    // The plugin leaves out what NCCL would not show; here all of it is wanted.
    // SAFETY: this process has no other thread yet.
    unsafe { std::env::set_var("NCCL_DEBUG", "INFO") };
    let plugin = Plugin::load(path, None)?;
    let config = Config::from_process().0;
    let without = config.without_devices(plugin.name());
    let count = plugin.start().with_context(|| format!("the plugin can't be used ({without})"))?;
    let devices = (0..count).map(|dev| plugin.properties(dev)).collect::<Result<Vec<_>, _>>()?;
    let log: Vec<_> = abi::take_log().into_iter().filter(|line| line.level <= abi::LOG_INFO).collect();

    if json {
        let found = net::discover(&config);
        let machine = found.survey.shown();
        let report = Report { plugin: path, network: plugin.name(), devices: &devices, log: &log, machine };
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        let (name, version) = (plugin.name(), plugin.version().number());
        println!("plugin {}, ABI v{version}, network {name} (select it with NCCL_NET={name})", path.display());
        if !devices.is_empty() {
            println!("{}", table(&devices));
        }
        if !log.is_empty() {
            println!("\nThe plugin's own words:");
        }
        for line in &log {
            println!("  {line}");
        }
    }
    if devices.iter().all(|device| device.name == net::STAND_IN) {
        let without = if devices.is_empty() { &*without } else { "the job stops (NCCL_NET_RDMA_STRICT)" };
        bail!("the plugin has no device that can be used: {without}");
    }
    Ok(())
}

fn table(devices: &[Properties]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let head = ["dev", "name", "port", "speed", "guid", "latency", "memory", "recvs", "comms", "PCI path"];
    table.set_header(head);
    for (dev, p) in devices.iter().enumerate() {
        table.add_row([
            dev.to_string(),
            p.name.clone(),
            p.port.to_string(),
            format!("{:.1} Gb/s", f64::from(p.speed_mbps) / 1000.0),
            format!("{:#018x}", p.guid),
            format!("{:.1} us", p.latency_us),
            memory_kinds(p.ptr_support),
            p.max_recvs.to_string(),
            p.max_comms.to_string(),
            p.pci_path.clone().unwrap_or_else(|| "none (near the first CPU)".to_owned()),
        ]);
    }
    table
}

fn memory_kinds(mask: i32) -> String {
    let kinds = [(abi::PTR_HOST, "host"), (abi::PTR_CUDA, "cuda (peermem or staging)"), (abi::PTR_DMABUF, "dma-buf")];
    kinds.iter().filter(|(bit, _)| mask & bit != 0).map(|(_, name)| *name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_kinds_are_named() {
        assert_eq!(memory_kinds(1), "host");
        assert_eq!(memory_kinds(5), "host, dma-buf");
        assert_eq!(memory_kinds(7), "host, cuda (peermem or staging), dma-buf");
    }

    #[test]
    fn guids_are_hex_text_in_json() {
        #[derive(serde::Serialize)]
        struct Shown(#[serde(serialize_with = "abi::hex")] u64);
        assert_eq!(serde_json::to_value(Shown(0xb8ce_f603_00ab_cdef)).unwrap(), "0xb8cef60300abcdef");
    }
}
