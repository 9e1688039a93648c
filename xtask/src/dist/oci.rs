//! The OCI image: `scratch` with the server, `bosh-dns-sync`, users and a configuration, as an image layout in a tar (OCI
//! Image Format Specification 1.1, image-layout.md). `podman load`, `skopeo copy oci-archive:` and
//! `docker load` accept it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use serde_json::{Value, json};

use super::{Release, architecture::Architecture, archive};
use crate::process::root;

/// A statically linked server and `bosh-dns-sync`.
pub(super) struct ImagePrograms {
    pub(super) architecture: Architecture,
    pub(super) server: PathBuf,
    pub(super) sync: PathBuf,
}

/// Writes the image: an index with a manifest for each architecture.
pub(super) fn write(release: &Release, programs: &[ImagePrograms]) -> Result<()> {
    let image = release.staging("image")?;
    fs::create_dir_all(image.join("blobs/sha256"))?;
    let manifests = programs
        .iter()
        .map(|programs| manifest(release, programs, &image))
        .collect::<Result<Vec<_>>>()?;
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
    // The layout names one image: this index, from which a tool takes its own architecture.
    let mut index = keep_json(&image, &index, INDEX)?;
    index["annotations"] = json!({"org.opencontainers.image.ref.name": "bosh-dns-xdp:latest"});
    let layout = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [index]});
    archive::put(&image.join("index.json"), layout.to_string(), 0o644)?;
    archive::put(
        &image.join("oci-layout"),
        json!({"imageLayoutVersion": "1.0.0"}).to_string(),
        0o644,
    )?;
    let name = format!("bosh-dns-xdp-{}-oci.tar", release.version);
    archive::tar(release, &image, &release.out.join(name))
}

/// Media type of a list of manifests.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Stores the image of one architecture; returns the descriptor of its manifest.
fn manifest(release: &Release, programs: &ImagePrograms, image: &Path) -> Result<Value> {
    let layer_files = layer(release, programs)?;
    let layer_tar = image.join("layer");
    archive::tar(release, &layer_files, &layer_tar)?;
    let layer = keep(image, &layer_tar, "application/vnd.oci.image.layer.v1.tar")?;
    let labels = json!({
        "org.opencontainers.image.title": "bosh-dns-xdp",
        "org.opencontainers.image.version": release.version,
        "org.opencontainers.image.revision": release.commit,
        "org.opencontainers.image.licenses": "Apache-2.0",
    });
    let architecture = programs.architecture.name();
    let platform = json!({"architecture": architecture, "os": "linux"});
    let mut config = platform.clone();
    config["config"] = json!({
        "Entrypoint": ["/bosh-dns-xdp"],
        "Cmd": ["run", "--config", "/etc/bosh-dns-xdp/config.json"],
        "Labels": labels,
    });
    // The digest of the unpacked layer, which is the layer's own, since it is not compressed.
    config["rootfs"] = json!({"type": "layers", "diff_ids": [layer["digest"]]});
    let config = keep_json(image, &config, "application/vnd.oci.image.config.v1+json")?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [layer],
    });
    let mut manifest = keep_json(
        image,
        &manifest,
        "application/vnd.oci.image.manifest.v1+json",
    )?;
    manifest["platform"] = platform;
    Ok(manifest)
}

/// Stages the files of an image.
fn layer(release: &Release, programs: &ImagePrograms) -> Result<PathBuf> {
    let ImagePrograms {
        architecture: _,
        server,
        sync,
    } = programs;
    let layer_files = release.staging("layer")?;
    for (program, name) in [(server, "bosh-dns-xdp"), (sync, "bosh-dns-sync")] {
        archive::copy(program, &layer_files.join(name), 0o755)?;
        // None, except in tests, which pack programs that are not static.
        for library in shared_libraries(program)? {
            let place = layer_files.join(library.strip_prefix("/")?);
            archive::copy(&library, &place, 0o755)?;
        }
    }
    let deploy = root().join("deploy/container");
    for (file, place) in [
        ("passwd", "etc/passwd"),
        ("group", "etc/group"),
        ("nsswitch.conf", "etc/nsswitch.conf"),
        ("config.json", "etc/bosh-dns-xdp/config.json"),
    ] {
        archive::copy(&deploy.join(file), &layer_files.join(place), 0o644)?;
    }
    let licenses = layer_files.join("licenses");
    for file in ["LICENSE", "third-party-notices.txt"] {
        archive::copy(&release.out.join(file), &licenses.join(file), 0o644)?;
    }
    // An image without a shell cannot make them at its start.
    for folder in ["run", "tmp", "var/lib/bosh-dns-xdp"] {
        fs::create_dir_all(layer_files.join(folder))?;
    }
    Ok(layer_files)
}

/// Returns the shared libraries of a program, the dynamic linker included; none if it is static.
fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    // ldd fails for static programs.
    let listed = Command::new("ldd").arg(program).output()?;
    let paths = String::from_utf8_lossy(&listed.stdout)
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect();
    Ok(paths)
}

/// Stores a JSON document as a blob; returns its descriptor.
fn keep_json(image: &Path, document: &Value, media_type: &str) -> Result<Value> {
    let file = image.join("document");
    archive::put(&file, document.to_string(), 0o644)?;
    keep(image, &file, media_type)
}

/// Moves a file into the blobs; returns its descriptor.
fn keep(image: &Path, file: &Path, media_type: &str) -> Result<Value> {
    let digest = archive::sha256(file)?;
    let size = fs::metadata(file)?.len();
    // Blobs are found by their digest (image-layout.md).
    fs::rename(file, image.join("blobs/sha256").join(&digest))?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size}))
}
